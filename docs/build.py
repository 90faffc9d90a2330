"""Two small generators.

python docs/build.py --out site     README.md and docs/*.md as HTML: a navigation, one stylesheet, no scripts
python docs/build.py --api          docs/api.md, from the docstrings of the package, and the generated tables of pages

A link to a page, a heading or a file that is not there is an error.
"""

import argparse
import ast
import dataclasses
import html
import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

DOCS = Path(__file__).resolve().parent
NAME = "CDLM"
ORDER = {
    "Start": ("README", "zoo", "idea", "tutorial", "first-tries", "faq"),
    "Use": (
        "training",
        "recipes",
        "many-gpus",
        "sampling",
        "python",
        "evaluation",
        "distributional",
        "harness",
        "studio",
        "hub",
        "transformers",
        "backbones",
        "diffusers",
    ),
    "Understand": (
        "paper",
        "choices",
        "peers",
        "joint",
        "moons",
        "sudoku",
        "study",
        "study-samples",
        "ablations",
        "search",
        "benchmarks",
        "reliability",
    ),
    "Build on it": ("extend", "networks", "api"),
}


class BrokenLink(ValueError):  # noqa: N818 (it is what it is)
    """A link that leads nowhere."""


@dataclasses.dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path
    tokens: list[Token]

    @property
    def out(self) -> str:
        return "index.html" if self.path.name == "README.md" else f"{self.path.stem}.html"

    @property
    def title(self) -> str:
        inline = next(self.tokens[k + 1] for k, token in enumerate(self.tokens) if token.type == "heading_open")
        return plain(inline)

    @property
    def anchors(self) -> set[str]:
        return {str(token.attrs["id"]) for token in self.tokens if token.type == "heading_open"}


def build(root: Path, out: Path) -> list[Page]:
    """Write the site."""
    pages = {path: read(path) for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]}
    out.mkdir(parents=True, exist_ok=True)
    site = Site(root, out, pages)
    for page in pages.values():
        site.write(page)
    (out / "style.css").write_text(STYLE)
    return list(pages.values())


def read(path: Path) -> Page:
    """Parse a file; headings get the anchors that code hosts give them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    seen: dict[str, int] = {}
    for token, inline in itertools.pairwise(tokens):
        if token.type == "heading_open":
            slug = re.sub(r"[^\w\- ]", "", plain(inline).lower()).strip().replace(" ", "-")
            number = seen.get(slug, 0)
            seen[slug] = number + 1
            token.attrs["id"] = f"{slug}-{number}" if number else slug
    return Page(path, tokens)


def plain(inline: Token) -> str:
    return "".join(child.content for child in inline.children or [] if child.type in ("text", "code_inline"))


@dataclasses.dataclass(frozen=True)
class Site:
    """Where everything is, and where it goes."""

    root: Path
    out: Path
    pages: dict[Path, Page]

    def write(self, page: Page) -> None:
        for token in walk(page.tokens):
            for name in ("href", "src"):
                if name in token.attrs:
                    token.attrs[name] = self.link(page, str(token.attrs[name]))
        render = MarkdownIt("commonmark").enable("table")
        body = render.renderer.render([t for t in page.tokens if not comment(t)], render.options, {})
        body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
        self.save(page.out, page.title, body, page)

    def save(self, name: str, title: str, body: str, page: Page | None = None) -> None:
        up, heading = "../" * name.count("/"), title if title == NAME else f"{title} · {NAME}"
        (self.out / name).parent.mkdir(parents=True, exist_ok=True)
        (self.out / name).write_text(
            TEMPLATE.format(title=html.escape(heading), up=up, nav=self.navigation(page, up), body=body)
        )

    def navigation(self, here: Page | None, up: str) -> str:
        groups = {name: [*stems] for name, stems in ORDER.items()}
        known = {stem for stems in groups.values() for stem in stems}
        by_stem = {page.path.stem: page for page in self.pages.values()}
        groups["More"] = [stem for stem in by_stem if stem not in known]
        parts = []
        for name, stems in groups.items():
            links = [by_stem[stem] for stem in stems if stem in by_stem]
            items = "".join(
                f'<li><a href="{up}{page.out}"{" aria-current=page" if page is here else ""}>'
                f"{html.escape('Home' if page.out == 'index.html' else page.title)}</a></li>"
                for page in links
            )
            parts.append(f"<h2>{name}</h2><ul>{items}</ul>" if links else "")
        return "".join(parts)

    def link(self, page: Page, target: str) -> str:
        """Where a link of a page leads in the site; files are taken along."""
        if re.match(r"[a-z]+:", target):
            return target
        where, _, anchor = target.partition("#")
        path = (page.path.parent / where).resolve() if where else page.path
        if path in self.pages:
            if anchor and anchor not in self.pages[path].anchors:
                raise BrokenLink(f"{page.path.name}: there is no heading #{anchor} in {path.name}")
            return (self.pages[path].out if where else "") + (f"#{anchor}" if anchor else "")
        if not path.exists() or not path.is_relative_to(self.root):
            raise BrokenLink(f"{page.path.name}: there is no {target}")
        name = str(path.relative_to(self.root)).removeprefix("docs/")
        if path.suffix in (".png", ".svg", ".ipynb", ".json"):
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.out / name)
            return name
        listing = path.read_text() if path.is_file() else "\n".join(sorted(p.name for p in path.iterdir()))
        body = f"<h1>{html.escape(name)}</h1><pre><code>{html.escape(listing)}</code></pre>"
        self.save(f"source/{name}.html", name, body)
        return f"source/{name}.html"


def walk(tokens: Sequence[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from walk(token.children or [])


def comment(token: Token) -> bool:
    return token.type == "html_block" and token.content.lstrip().startswith("<!--")


TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="stylesheet" href="{up}style.css">
</head>
<body>
<a class="skip" href="#text">Skip to the text</a>
<nav aria-label="Pages"><details><summary>Pages</summary>{nav}</details></nav>
<main id="text">
{body}</main>
</body>
</html>
"""

# The list of pages is a <details> that is closed. On wide screens its content is shown all the same, and its button is
# not; a browser too old for that (no ::details-content) keeps the button. What can be scrolled sideways has a shadow
# where it goes on: two covers that move with the content lie over two shadows that do not.
STYLE = (DOCS / "site.css").read_text()


def api() -> str:
    """docs/api.md: the names that other code may rely on, with their own words."""
    import cdlm.data.prepare
    import cdlm.data.tokens
    import cdlm.eval.config
    import cdlm.methods
    import cdlm.methods.spec
    import cdlm.metrics.likelihood
    import cdlm.model.config
    import cdlm.model.denoiser
    import cdlm.model.ema
    import cdlm.objective
    import cdlm.process
    import cdlm.rng
    import cdlm.sample.draw
    import cdlm.sample.generate
    import cdlm.sample.samplers
    import cdlm.sample.settings
    import cdlm.text.likelihood
    import cdlm.text.pipeline
    import cdlm.train
    import cdlm.train.config
    from cdlm.studio.app import create_app

    pipeline, objective = cdlm.text.pipeline.Pipeline, cdlm.objective.Objective
    lines = [
        "# API",
        "",
        "Written by `python docs/build.py --api` from the docstrings; do not edit it by hand.",
        "What is not listed here may change.",
        "",
        "## Pipelines",
        "",
        "[The Python API](python.md) has examples.",
        "",
        *function(cdlm.text.pipeline.load, "cdlm.load"),
        *kind(pipeline, "cdlm.text.pipeline.Pipeline"),
        *(line for name in METHODS_OF_PIPELINE for line in function(getattr(pipeline, name), f"Pipeline.{name}")),
        *kind(cdlm.text.pipeline.Sample, "cdlm.text.pipeline.Sample"),
        *kind(cdlm.text.pipeline.Frame, "cdlm.text.pipeline.Frame"),
        *kind(cdlm.text.likelihood.Likelihood, "cdlm.text.likelihood.Likelihood"),
        *kind(cdlm.text.likelihood.CorpusLikelihood, "cdlm.text.likelihood.CorpusLikelihood"),
        "## Samplers",
        "",
        "The fields of `cdlm.sample.settings.Settings` are listed in [sampling](sampling.md#settings), and so are",
        "the rows of `cdlm.sample.samplers.SAMPLERS` ([samplers](sampling.md#samplers)).",
        "",
        *function(cdlm.sample.settings.resolve, "cdlm.sample.settings.resolve"),
        *function(cdlm.sample.generate.generate, "cdlm.sample.generate.generate"),
        *kind(cdlm.sample.draw.State, "cdlm.sample.draw.State"),
        *function(cdlm.sample.draw.make_draw, "cdlm.sample.draw.make_draw"),
        *kind(cdlm.sample.draw.Draw, "cdlm.sample.draw.Draw"),
        *function(cdlm.sample.draw.Draw.log_probs, "Draw.log_probs"),
        *kind(cdlm.sample.samplers.Sampler, "cdlm.sample.samplers.Sampler"),
        *kind(cdlm.sample.samplers.UnmaskingOrder, "cdlm.sample.samplers.UnmaskingOrder"),
        "## Methods",
        "",
        "`cdlm.methods.METHODS` maps slugs to rows: " + ", ".join(f"`{slug}`" for slug in cdlm.methods.METHODS) + ".",
        "",
        *kind(cdlm.methods.Method, "cdlm.methods.Method"),
        *function(cdlm.methods.Method.__call__, "Method.__call__"),
        *function(cdlm.methods.spec.parse_method, "cdlm.methods.spec.parse_method"),
        *kind(objective, "cdlm.objective.Objective"),
        *function(objective.loss, "Objective.loss"),
        *kind(cdlm.objective.Term, "cdlm.objective.Term"),
        "## Processes",
        "",
        *(line for name in ("masked", "uniform", "unigram") for line in process(name)),
        *kind(cdlm.process.Process, "cdlm.process.Process"),
        *function(cdlm.process.Process.corrupt, "Process.corrupt"),
        *function(cdlm.process.Process.bridge, "Process.bridge"),
        *kind(cdlm.process.LogLinear, "cdlm.process.LogLinear"),
        *kind(cdlm.process.Cosine, "cdlm.process.Cosine"),
        "## Training",
        "",
        "[Bring your own network](networks.md) has examples.",
        "",
        *function(cdlm.train.train, "cdlm.train.train"),
        *function(cdlm.data.prepare.prepare, "cdlm.data.prepare.prepare"),
        *function(cdlm.data.tokens.open_tokens, "cdlm.data.tokens.open_tokens"),
        *kind(cdlm.model.denoiser.Denoiser, "cdlm.model.denoiser.Denoiser"),
        *function(cdlm.model.ema.frozen_copy, "cdlm.model.ema.frozen_copy"),
        *function(cdlm.model.ema.update, "cdlm.model.ema.update"),
        *function(cdlm.metrics.likelihood.nelbo, "cdlm.metrics.likelihood.nelbo"),
        *function(cdlm.rng.seeded, "cdlm.rng.seeded"),
        "## Settings of commands",
        "",
        "On the command line `--log-every 10` is `log_every`; `cdlm train RECIPE --help` and so on say the same.",
        "",
        *kind(cdlm.train.config.TrainConfig, "cdlm.train.config.TrainConfig"),
        *kind(cdlm.model.config.NetworkConfig, "cdlm.model.config.NetworkConfig"),
        *kind(cdlm.eval.config.EvalConfig, "cdlm.eval.config.EvalConfig"),
        "## HTTP",
        "",
        "What `cdlm studio` answers; `/openapi.json` has the types. See [the studio](studio.md).",
        "",
        "| path | |",
        "| --- | --- |",
        *paths(create_app({}).openapi()),
    ]
    return "\n".join(lines).rstrip() + "\n"


METHODS_OF_PIPELINE = (
    "sample", "infill", "rewrite", "stream", "encode", "logits", "log_probs", "nelbo", "score", "save_pretrained",
    "resolve",
)  # fmt: skip


def with_tables(name: str) -> str:
    """A page with its tables as the code has them."""
    page = (DOCS / name).read_text()
    for title, table in TABLES[name].items():
        begin = f"<!-- {title} -->\n"
        before, after = page.split(begin)
        page = before + begin + "\n".join(table()) + "\n" + after[after.index("<!-- end -->") :]
    return page


def samplers() -> list[str]:
    """Every sampler, the models that it is for, and the settings that it reads."""
    from cdlm.sample.samplers import SAMPLERS

    models = {"any": "any process", "masked": "masked", "none": "autoregressive"}
    lines = ["| sampler | | model | settings that it reads |", "| --- | --- | --- | --- |"]
    for name, row in SAMPLERS.items():
        read = ", ".join(
            f"`{setting}`" + (f" ({', '.join(row.choices[setting])})" if setting in row.choices else "")
            for setting in row.settings
        )
        model = models[row.process] + (", with a joint head" if row.joint_head else "")
        lines.append(f"| {name} | {row.about} | {model} | {read} |")
    return lines


def settings() -> list[str]:
    """Every setting, its default, its values and its help."""
    from cdlm.sample.samplers import ORDERS
    from cdlm.sample.settings import SPECS, TYPES, choices

    lines = ["| setting | default | values | |", "| --- | --- | --- | --- |"]
    for name, spec in SPECS.items():
        values = "see above" if name == "sampler" else ", ".join(choices(name)) or TYPES[name].__name__
        about = [f"{order}: {row.about}." for order, row in ORDERS.items()] if name == "order" else []
        default = "off" if spec.default is None else spec.default
        lines.append(f"| `{name}` | {default} | {values} | {' '.join([spec.help, *about])} |")
    return lines


def process(name: str) -> list[str]:
    import cdlm.process

    return function(getattr(cdlm.process, name), f"cdlm.process.{name}")


def function(found: Callable[..., Any], name: str) -> list[str]:
    """A signature and what it says of itself."""
    parts = []
    for parameter in inspect.signature(found).parameters.values():
        star = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        value = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        parts += [] if parameter.name == "self" else [star + parameter.name + value]
    return [f"### `{name}`", "", "```text", *call(name, parts), "```", "", *paragraphs(inspect.getdoc(found) or "")]


def call(name: str, parts: list[str]) -> list[str]:
    line = f"{name}({', '.join(parts)})"
    return [line] if len(line) <= 120 else textwrap.wrap(line, 120, subsequent_indent="    ", break_long_words=False)


def kind(found: type, name: str) -> list[str]:
    """A record: what it says of itself, and its fields."""
    about = fields(found)
    lines = [f"### `{name}`", "", *paragraphs(inspect.getdoc(found) or "")]
    if not about:
        return lines
    rows = [f"| `{field}` | {cell(default)} | {cell(text)} |" for field, default, text in about]
    return [*lines, "| field | default | |", "| --- | --- | --- |", *rows, ""]


def fields(found: type) -> list[tuple[str, str, str]]:
    """Names, defaults and the strings that stand beneath them, as the source has them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    assert isinstance(tree, ast.ClassDef)
    rows = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = str(after.value.value) if said else ""
            default = f"`{ast.unparse(node.value)}`" if node.value is not None else ""
            if "field(" in default:
                made = re.search(r"default(_factory)?=([\w.]+)", default)
                default = f"`{made[2]}{'()' * bool(made[1])}`" if made else ""
            rows.append((node.target.id, default, " ".join(text.split())))
    return rows


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def paragraphs(text: str) -> list[str]:
    return [*text.splitlines(), ""]


def paths(description: dict[str, Any]) -> list[str]:
    found = []
    for path, methods in description["paths"].items():
        for verb, about in methods.items():
            found.append(f"| `{verb.upper()} {path}` | {about.get('description', '')} |")
    return found


def columns() -> list[str]:
    """The columns of the distributional protocol."""
    from cdlm.eval.columns import COLUMNS

    rows = [f"| {column.title} | `{name}` | {column.about} |" for name, column in COLUMNS.items()]
    return ["| column | in results | |", "| --- | --- | --- |", *rows]


def naive_samplers() -> list[str]:
    """The samplers that know nothing of language."""
    from cdlm.eval.naive import NAIVE_SAMPLERS

    rows = [f"| {name} | {sampler.about} |" for name, sampler in NAIVE_SAMPLERS.items()]
    return ["| naive sampler | |", "| --- | --- |", *rows]


TABLES = {
    "sampling.md": {"samplers": samplers, "settings": settings},
    "distributional.md": {"columns": columns, "naive samplers": naive_samplers},
}
"""Tables that are generated, by page and by the comment before them."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the site")
    parser.add_argument("--api", action="store_true", help="write docs/api.md and the generated tables of other pages")
    chosen = parser.parse_args(arguments)
    if chosen.api:
        (DOCS / "api.md").write_text(api())
        for name in TABLES:
            (DOCS / name).write_text(with_tables(name))
        print(f"wrote {DOCS / 'api.md'} and the tables of {', '.join(TABLES)}")
    if chosen.out:
        try:
            pages = build(DOCS.parent, chosen.out)
        except BrokenLink as error:
            raise SystemExit(f"build: {error}") from None
        print(f"wrote {len(pages)} pages to {chosen.out}; open {chosen.out / 'index.html'}")
    if not chosen.api and not chosen.out:
        parser.error("nothing to do: give --out FOLDER or --api")


if __name__ == "__main__":
    main()
