"""The site: every page, every link, no scripts, nothing from outside; and an API page that is what the code says."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cdlm_docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_site_is_whole(builder: ModuleType, tmp_path: Path) -> None:
    pages = builder.build(ROOT, tmp_path)
    assert len(pages) == 1 + len(list((ROOT / "docs").glob("*.md")))
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert "<script" not in text
        assert "style.css" in text
        assert not re.search(r'(?:src|link href)="[a-z]+:', text), page.name
        for target in re.findall(r'(?:href|src)="([^"#]+)', text):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
    front = (tmp_path / "index.html").read_text()
    assert 'src="moons.png"' in front
    assert 'href="idea.html"' in front
    assert front.count("aria-current") == 1
    assert "<title>CDLM</title>" in front
    assert "<title>Questions · CDLM</title>" in (tmp_path / "faq.html").read_text()
    assert "needs: hub" not in (tmp_path / "harness.html").read_text()
    assert "prefers-color-scheme: dark" in (tmp_path / "style.css").read_text()


def test_the_list_of_pages_is_folded_where_there_is_little_room(builder: ModuleType, tmp_path: Path) -> None:
    """By HTML, so that keys open it; a wide screen shows it by CSS, and only then takes its button away."""
    builder.build(ROOT, tmp_path)
    for page in tmp_path.rglob("*.html"):
        (inside,) = re.findall(r"<nav[^>]*><details><summary>Pages</summary>(.*?)</details></nav>", page.read_text())
        assert inside.count("<a ") == 1 + len(list((ROOT / "docs").glob("*.md")))
    style = (tmp_path / "style.css").read_text()
    wide = style[style.index("@media (min-width") :]
    assert wide.index("@supports selector(::details-content)") < wide.index("summary { display: none; }")
    assert style.count("summary { display: none; }") == 1


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("nowhere.md", "there is no nowhere.md"),
        ("idea.md#nothing", "no heading #nothing in idea.md"),
        ("#here", "no heading #here in bad.md"),
        ("missing.png", "there is no missing.png"),
        ("../../outside.md", "there is no"),
    ],
)
def test_a_broken_link_is_an_error(builder: ModuleType, tmp_path: Path, link: str, message: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Front\n\n[a page](docs/idea.md#the-anchor)\n")
    shutil.copyfile(ROOT / "docs" / "moons.png", tmp_path / "docs" / "moons.png")
    (tmp_path / "docs" / "idea.md").write_text("# Idea\n\n## The anchor\n\n![moons](moons.png) [up](../README.md)\n")
    builder.build(tmp_path, tmp_path / "site")
    (tmp_path / "docs" / "bad.md").write_text(f"# Bad\n\n[a link]({link})\n")
    with pytest.raises(builder.BrokenLink, match=message):
        builder.build(tmp_path, tmp_path / "site")


def test_the_api_page_is_what_the_code_says(builder: ModuleType) -> None:
    pytest.importorskip("fastapi")
    page = (ROOT / "docs" / "api.md").read_text()
    assert page == builder.api(), "docs/api.md is out of date: python docs/build.py --api"
    for name in (
        "cdlm.load",
        "Pipeline.infill",
        "cdlm.objective.Term",
        "cdlm.process.unigram",
        "log_every",
        "/v1/infill",
    ):
        assert f"`{name}`" in page or name in page


def test_generated_tables_are_what_the_code_says(builder: ModuleType) -> None:
    for name in builder.TABLES:
        text = (ROOT / "docs" / name).read_text()
        assert text == builder.with_tables(name), f"docs/{name} is out of date: python docs/build.py --api"
    page = (ROOT / "docs" / "sampling.md").read_text()
    assert "| entropy-bound | lowest entropies first" in page
    assert "| `top_p` | 1.0 |" in page
