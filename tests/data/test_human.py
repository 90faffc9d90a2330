"""The human text of the package: small, licensed, and enough for a cell of 128 samples."""

import lzma

import cdlm
from cdlm.data import END
from cdlm.data.human import FILE
from cdlm.eval.human_text import read_human_text


def test_it_is_small_and_has_its_licence() -> None:
    text = lzma.decompress(FILE.read_bytes())
    assert len(text) <= 1_000_000
    assert FILE.stat().st_size < 400_000
    assert text.decode().count(END) == 132
    assert "CC BY-SA 3.0" in (FILE.parent / "LICENSE").read_text()


def test_the_parts_share_no_text() -> None:
    human = read_human_text(None, cdlm.load("mdlm", "cpu"), 256, 128)
    assert (len(human.held), len(human.pool)) == (128, 512)
    assert len(human.fit) > 100
    parts = [human.fit, human.held, human.pool]
    spans = [{tuple(text[k : k + 30]) for text in part for k in range(len(text) - 30)} for part in parts]
    assert not spans[0] & spans[1]
    assert not spans[0] & spans[2]
    assert not spans[1] & spans[2]
    assert len({tuple(text) for part in parts for text in part}) == sum(map(len, parts))
