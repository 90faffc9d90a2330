"""The page of `cdlm demo`: one HTML file that holds its pictures, needs nothing from outside, and can be passed on."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

Shown = tuple[str, str, str, str]
"""A text: the model's name, its settings, what it took, and the text itself."""

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
th{font-size:.85rem;color:var(--soft)}td:nth-child(4){min-width:24rem}td:nth-child(2){min-width:9rem}.few{white-space:nowrap}
code{font:.9em ui-monospace,Menlo,Consolas,monospace}.soft{color:var(--soft);font-size:.88rem}
"""


def page(texts: Sequence[Shown], pictures: Sequence[Path], moons: Path | None, commands: Mapping[str, str]) -> str:
    """The first texts beside each other as they resolved, by their `pictures`; all of them to read, the moons if there
    are any, and what to try next."""
    moving = list(zip(pictures, texts, strict=False))
    names = " and ".join(name for _, (name, *_) in moving)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>CDLM: what few steps buy</title><style>{_STYLE}</style></head><body>",
        "<h1>What few steps buy</h1>",
        f"<p>{_safe(names)} begin with nothing but blanks and fill them anywhere, many at once, step by step. "
        "Colours tell in which step a word was written; ∎ ends a text: what "
        "stands among these is drawn here and left out of the text below.</p>",
        '<div class="two">',
        *(_figure(picture, text, _flags(settings)) for picture, (_, settings, _, text) in moving),
        "</div>",
        "<h2>In fewer steps, and in more</h2>",
        "<p>The same models and seed, with the settings that were found best for the nearest number of steps; the last "
        "two rows by the plain sampler, in random order and from the law as it is. A step costs the same whatever it "
        "writes: with half of them a text takes half the time, and more words are written at once, which know less of "
        "each other. One text of each says little: docs/zoo.md has what two judges found in 64.</p>",
        '<div class="wide"><table><tr><th>model</th><th>settings</th><th>took</th><th>text</th></tr>',
        *(
            f'<tr><td class="few">{_safe(name)}</td><td>{_flags(settings)}</td>'
            f'<td class="few">{_safe(cost).replace(", ", "<br>")}</td><td>{_safe(text)}</td></tr>'
            for name, settings, cost, text in texts
        ),
        "</table></div>",
    ]
    if moons is not None:
        parts += [
            "<h2>Two moons: the same where everything is known</h2>",
            "<p>A point is a text of two words, its column and its row. In one step the two do not know of each other; "
            "every further step helps, and how much can be computed exactly (the first row).</p>",
            _figure(moons, "What each model draws in 1 to 50 steps", "on: share of points on the moons; TV: distance"),
        ]
    parts += ["<h2>Try next</h2>", '<div class="wide"><table>']
    parts += [
        f'<tr><td class="few"><code>{_safe(line)}</code></td><td>{_safe(what)}</td></tr>'
        for line, what in commands.items()
    ]
    return "\n".join([*parts, "</table></div></body></html>", ""])


def _figure(picture: Path, about: str, caption: str) -> str:
    kind = {".svg": "image/svg+xml", ".png": "image/png"}[picture.suffix]
    data = base64.b64encode(picture.read_bytes()).decode()
    image = f'<img alt="{_safe(about)}" src="data:{kind};base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _flags(settings: str) -> str:
    """Code that breaks between settings only."""
    return " ".join(f'<code class="few">--{_safe(one)}</code>' for one in settings.removeprefix("--").split(" --"))


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
