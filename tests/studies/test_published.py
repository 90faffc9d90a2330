"""studies/published.py on stand-ins: random weights in the public layouts, and a random judge. The hub is not asked."""

from pathlib import Path

import pytest

from cdlm.eval.results import read_rows
from cdlm.sample.settings import check_value
from studies import published

from ..peers.layouts import LAYOUTS, write_peer
from ..writers import write_model

ROWS = {"MDLM": "mdlm-owt", "SDTT": "sdtt", "DUO": "duo", "DUO+DCD": "duo-distilled"}


def test_the_command_on_stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = write_model(tmp_path / "judge", "causal", length=64)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n<|endoftext|>\n".join(f"a text, number {k}, of some length " for k in range(20)))
    copies = [f"{label}={write_peer(tmp_path / name, LAYOUTS[name])}" for label, name in ROWS.items()]
    out = tmp_path / "out"
    command = ["published", "--model", *copies, "--tokenizer", "bytes", "--judge", str(judge), "--out", str(out)]
    command += ["--texts", f"openwebtext={texts}", "--num-samples", "4", "--device", "cpu", "--steps", "4", "8"]
    monkeypatch.setattr("sys.argv", command)
    published.main()
    rows = read_rows(out)
    measured = {(row["model"], row["task"], (row.get("sampling") or {}).get("steps")) for row in rows}
    assert measured == {
        ("MDLM", "likelihood", None),
        ("MDLM", "unconditional", 8),
        ("SDTT", "unconditional", 8),
        ("DUO+DCD", "unconditional", 4),
    }
    assert {row["sampling"]["final_step"] for row in rows if row["model"] == "DUO+DCD"} == {"argmax", "none"}
    table = (out / "published.md").read_text()
    (nelbo,) = (row["nelbo_ppl"] for row in rows if row["task"] == "likelihood")
    line = next(line for line in table.splitlines() if "NELBO" in line)
    assert line.startswith(f"| MDLM | NELBO perplexity, openwebtext | {nelbo:.1f} (")
    assert f"| 23.07 | {nelbo / 23.07:.2f} |" in line
    assert "| DUO+DCD | 4 steps, final_step argmax |" in table
    assert "differs" in table  # random weights
    capsys.readouterr()
    published.main()  # nothing is computed again
    assert len(read_rows(out)) == len(rows)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (("--models SDTT", "pull one"), ("--model UDLM=x", "a label among MDLM")):
        monkeypatch.setattr("sys.argv", ["published", *flags.split()])
        with pytest.raises(SystemExit):
            published.main()
        assert message in capsys.readouterr().err


def test_every_setting_is_one_of_the_sampler() -> None:
    for model in published.PUBLIC_MODELS.values():
        for number in model.numbers:
            for name, value in number.settings:
                check_value(name, value)
            assert (number.steps is None) == (number.entropy is None)
