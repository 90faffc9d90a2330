"""The network as the compiler sees it, traced and cut as on a GPU but without generated code; in a process of its own,
where nothing checks the types of traced tensors."""

import json
import subprocess
import sys

SCRIPT = """
import json, torch
from cdlm.model.config import SIZES
from cdlm.model.dit import DiT

torch.manual_seed(0)
network = DiT(SIZES["tiny"], inputs=12, outputs=11).double()
for parameter in network.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
x, level, found, wide = torch.randint(0, 12, (2, 9)), torch.rand(2).double(), [], []
for compiled in (False, True):
    if compiled:
        network.compile(backend="aot_eager_decomp_partition")
    network.zero_grad()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y.shape) or y, lambda y: y):
        hidden = network(x, level, network.rotary(9))
    hidden.square().sum().backward()
    found.append([parameter.grad for parameter in network.parameters() if parameter.grad is not None])
    wide.append(sum(shape.numel() == 18 * 4 * SIZES["tiny"].hidden_size for shape in kept))
off = max(float((a - b).norm() / (a.norm() + 1e-12)) for a, b in zip(*found, strict=True))
print(json.dumps({"off": off, "wide": wide, "blocks": SIZES["tiny"].num_layers, "gradients": len(found[0])}))
"""


def test_compiled_training_keeps_one_wide_tensor_a_block_and_the_same_gradient() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gradients"] > 20
    assert found["off"] < 1e-9
    assert found["wide"] == [2 * found["blocks"], found["blocks"]]
