"""Token files: batches are pure functions of (seed, step), every epoch holds every block once, damage is named."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.tokens import TokenError, TokenFile, open_tokens, read_meta, shuffled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """26 documents, each a block of 10 ids: a letter seven times, the end of text, and the frame; 2 for validation."""
    text = "\n<|endoftext|>\n".join(letter * 7 for letter in "abcdefghijklmnopqrstuvwxyz")
    (tmp_path / "x.txt").write_text(text)
    config = PrepareConfig((str(tmp_path / "x.txt"),), tmp_path / "tokens", seq_length=10, valid_documents=2)
    prepare(config, Console(quiet=True))
    return tmp_path / "tokens"


@pytest.fixture
def plain(folder: Path) -> TokenFile:
    file = open_tokens(folder)
    return dataclasses.replace(file, meta=dataclasses.replace(file.meta, packing="plain"))


def test_blocks_are_the_file_in_order(folder: Path) -> None:
    file = open_tokens(folder)
    assert file.blocks() == 24
    whole = torch.cat(list(file.validation(5)))
    assert whole.shape == (24, 10)
    assert whole.dtype == torch.int64
    assert torch.equal(whole.flatten(), torch.from_numpy(np.fromfile(folder / "train.bin", "<u2").astype(np.int64)))
    assert whole[0].tolist() == [256, *[ord("a")] * 7, 256, 256]
    assert [len(batch) for batch in file.validation(5)] == [5, 5, 5, 5, 4]
    assert open_tokens(folder, "valid").blocks() == 2


@pytest.mark.parametrize("batch", [1, 5, 24, 70])
def test_every_epoch_holds_every_block_once(folder: Path, batch: int) -> None:
    file, epochs = open_tokens(folder), 3
    steps = math.ceil(epochs * 24 / batch)
    rows = torch.cat([file.batch(step, seed=1, batch=batch) for step in range(steps)])[:, 1]
    orders = []
    for epoch in range(epochs):
        order = rows[24 * epoch : 24 * (epoch + 1)].tolist()
        assert sorted(order) == [ord("a") + k for k in range(24)]
        orders.append(tuple(order))
    assert len(set(orders)) == epochs


def test_batches_depend_on_seed_and_step_alone(folder: Path) -> None:
    file = open_tokens(folder)
    assert torch.equal(file.batch(7, 3, 8), open_tokens(folder).batch(7, 3, 8))
    assert not torch.equal(file.batch(7, 3, 8), file.batch(7, 4, 8))
    assert not torch.equal(file.batch(7, 3, 8), file.batch(8, 3, 8))


def test_rows_of_a_batch_are_its_slices(folder: Path) -> None:
    file = open_tokens(folder)
    for step in range(6):
        whole = file.batch(step, 0, 10)
        for rank in range(2):
            rows = torch.arange(rank, 10, 2)
            assert torch.equal(file.batch(step, 0, 10, rows=rows), whole[rows])
        assert file.batch(step, 0, 10, rows=torch.tensor([], dtype=torch.long)).shape == (0, 10)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 26, 100, 1023])
def test_shuffles_are_permutations(n: int) -> None:
    for epoch in range(5):
        assert shuffled(torch.arange(n), n, 0, epoch).sort().values.equal(torch.arange(n))


def test_shuffles_bring_every_block_into_every_place_as_often() -> None:
    count = torch.zeros(5, 5)
    for epoch in range(300):
        count[torch.arange(5), shuffled(torch.arange(5), 5, 0, epoch)] += 1
    assert ((count - 60) ** 2 / 60).sum() < 70  # 16 degrees of freedom, p < 1e-7


def test_shuffles_of_a_trillion_blocks_need_no_memory() -> None:
    n = 10**12
    drawn = shuffled(torch.arange(n - 1000, n), n, 0, 0)
    assert len(drawn.unique()) == 1000
    assert drawn.min() >= 0
    assert drawn.max() < n
    assert (drawn.double() / n).mean().item() == pytest.approx(0.5, abs=0.06)


def test_plain_packing_takes_any_length(plain: TokenFile) -> None:
    assert plain.blocks(7) == 240 // 7
    assert torch.equal(plain.read(torch.tensor([1]), 7)[0], torch.from_numpy(plain.ids[7:14].astype(np.int64)))
    assert plain.batch(0, 0, 4, length=240).shape == (4, 240)
    with pytest.raises(TokenError, match="240 tokens, not one block of 241; use a --seq-length of at most 240"):
        plain.batch(0, 0, 4, length=241)
    with pytest.raises(TokenError, match="--seq-length must be at least 1"):
        plain.blocks(0)


@pytest.mark.parametrize("length", [9, 11])
def test_wrapped_packing_has_its_length(folder: Path, length: int) -> None:
    with pytest.raises(
        TokenError, match=f"use --seq-length 10, or prepare again with --seq-length {length} or --packing plain"
    ):
        open_tokens(folder).batch(0, 0, 1, length=length)


def test_another_vocabulary_is_refused(folder: Path) -> None:
    open_tokens(folder).check_vocabulary(257)
    with pytest.raises(TokenError, match="a vocabulary of 257, but the model has 50257"):
        open_tokens(folder).check_vocabulary(50257)


def test_ids_outside_the_vocabulary_are_named_by_their_byte(folder: Path) -> None:
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[33] = 40_000
    ids.tofile(folder / "train.bin")
    with pytest.raises(TokenError, match=r"train.bin has the id 40000 at byte 66, outside the vocabulary of 257"):
        list(open_tokens(folder).validation(4))


def test_missing_and_truncated_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TokenError, match=r"no directory .*nowhere; make it first, with: cdlm prepare FILE --out .*nowhere$"
    ):
        open_tokens(tmp_path / "nowhere")
    with pytest.raises(TokenError, match=r"meta.json is missing; make one with: cdlm prepare FILE --out"):
        open_tokens(tmp_path)
    data = (folder / "train.bin").read_bytes()
    for other, what in (
        (data[:-1], "truncated: 479 bytes, but meta.json says 480"),
        (data * 2, "not the file that was"),
    ):
        (folder / "train.bin").write_bytes(other)
        with pytest.raises(TokenError, match=f"train.bin is {what}"):
            open_tokens(folder)
    (folder / "train.bin").unlink()
    with pytest.raises(TokenError, match=r"train.bin is missing; copy it beside meta.json"):
        open_tokens(folder)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"version": 2}, "newer cdlm .format 2, this one reads 1.; upgrade"),
        ({"dtype": "float32"}, "says dtype 'float32'"),
        ({"vocab": 70_000}, "cannot hold a vocabulary of 70000"),
        ({"vocab": None}, "is damaged"),
        ({"splits": {"train": {}}}, "is damaged"),
        ({"novelty": 1}, "is damaged"),
    ],
)
def test_foreign_meta_is_named(folder: Path, change: dict[str, object], advice: str) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TokenError, match=advice) as caught:
        open_tokens(folder)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", '{"version": "x"}', "null"])
def test_meta_that_is_not_json_of_ours(folder: Path, content: str) -> None:
    (folder / "meta.json").write_text(content)
    with pytest.raises(TokenError, match=r"meta.json is damaged .* run cdlm prepare again"):
        read_meta(folder)


def test_a_split_that_was_not_prepared(folder: Path) -> None:
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    del meta["splits"]["valid"]
    path.write_text(json.dumps(meta))
    with pytest.raises(TokenError, match=r"without a valid split \(it has train\).*--valid-fraction 0.01"):
        open_tokens(folder, "valid")
