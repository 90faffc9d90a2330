"""The page of `cdlm demo`: one self-contained HTML file."""

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class PageSample:
    """A sample as the page shows it."""

    model: str
    flags: str
    """Its settings as command-line flags."""
    cost: str
    text: str


_STYLE = """
:root{color-scheme:light dark;--paper:#faf9f6;--card:#fff;--ink:#1d1e24;--soft:#5b5d68;--line:#e2e0da}
@media (prefers-color-scheme:dark){:root{--paper:#131418;--card:#1d1f25;--ink:#f0efeb;--soft:#a6a8b3;--line:#33353e}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:100rem;background:var(--paper);color:var(--ink)}
body{font:16px/1.55 system-ui,sans-serif}
h1{font-size:1.7rem;margin:.2em 0}h2{font-size:1.2rem;margin:2.2em 0 .4em}p{max-width:70ch;margin:.4em 0 1em}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem}
figure{margin:0;padding:.8rem;background:var(--card);border:1px solid var(--line);border-radius:10px}
figure img{display:block;width:100%;height:auto;border-radius:6px}
figcaption{color:var(--soft);font-size:.88rem;margin-top:.5rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.5rem .7rem;border-bottom:1px solid var(--line)}
th{font-size:.85rem;color:var(--soft)}td:nth-child(4){min-width:24rem}td:nth-child(2){min-width:9rem}.nowrap{white-space:nowrap}
@media (max-width:40rem){
table,tbody,tr,td{display:block}tr:has(th){display:none}tr{padding:.7rem 0;border-bottom:1px solid var(--line)}
td{padding:.1rem 0;border:0}td:nth-child(4){min-width:0;margin-top:.4rem}code.nowrap,td.nowrap{white-space:normal}}
code{font:.9em ui-monospace,Menlo,Consolas,monospace}.soft{color:var(--soft);font-size:.88rem}
"""


def demo_page(
    samples: Sequence[PageSample], pictures: Sequence[Path], moons: Path | None, commands: Mapping[str, str]
) -> str:
    """The `pictures` of the first samples side by side, all samples as text, the moons if there are any, and commands
    to try next."""
    animated = list(zip(pictures, samples, strict=False))
    names = " and ".join(sample.model for _, sample in animated)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>CDLM: few-step samples</title><style>{_STYLE}</style></head><body>",
        "<h1>Few-step samples</h1>",
        f"<p>{_escape(names)} start from a fully masked sequence and fill in many tokens at once, anywhere in the "
        "text, step by step. Colours show in which step a token was drawn. ∎ is the EOS token: what stands among these "
        "is shown here and left out of the text below.</p>",
        '<div class="two">',
        *(_figure(picture, sample.text, _flags(sample.flags)) for picture, sample in animated),
        "</div>",
        "<h2>Fewer and more steps</h2>",
        "<p>The same models and seed, with the settings of the generation config for the nearest number of steps; the "
        "last two rows use the plain sampler: random order, no temperature, no guidance. Every step costs the same, so "
        "half the steps take half the time, and more tokens are drawn at once, independently of each other. One sample "
        "of each says little: docs/zoo.md has the scores of two judges on 64 samples.</p>",
        '<div class="wide"><table><tr><th>model</th><th>settings</th><th>cost</th><th>text</th></tr>',
        *(
            f'<tr><td class="nowrap">{_escape(sample.model)}</td><td>{_flags(sample.flags)}</td>'
            f'<td class="nowrap">{_escape(sample.cost).replace(", ", "<br>")}</td><td>{_escape(sample.text)}</td></tr>'
            for sample in samples
        ),
        "</table></div>",
    ]
    if moons is not None:
        parts += [
            "<h2>Two moons: the same with a known distribution</h2>",
            "<p>A point is a text of two tokens, its column and its row. A single step draws both independently; every "
            "further step helps, and the exact sampler shows by how much (the first row).</p>",
            _figure(
                moons,
                "Samples of each model in 1 to 50 steps",
                "on: share of points on the moons; TV: total variation distance",
            ),
        ]
    parts += ["<h2>Try next</h2>", '<div class="wide"><table>']
    parts += [
        f'<tr><td class="nowrap"><code>{_escape(command)}</code></td><td>{_escape(about)}</td></tr>'
        for command, about in commands.items()
    ]
    return "\n".join([*parts, "</table></div></body></html>", ""])


def _figure(picture: Path, alt: str, caption: str) -> str:
    mime_type = {".svg": "image/svg+xml", ".png": "image/png"}[picture.suffix]
    data = base64.b64encode(picture.read_bytes()).decode()
    image = f'<img alt="{_escape(alt)}" src="data:{mime_type};base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _flags(flags: str) -> str:
    """Code that breaks between flags only."""
    return " ".join(f'<code class="nowrap">--{_escape(flag)}</code>' for flag in flags.removeprefix("--").split(" --"))


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
