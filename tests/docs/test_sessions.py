"""Interactive sessions of the documentation, in blocks of `pycon`: they print what the page says that they print.

They talk to a server of the bundled models, as `cdlm studio` starts it, or open `my-model`, which is one of them.
"""

import doctest
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import uvicorn

import cdlm
from cdlm import zoo
from cdlm.studio.app import create_app

DOCS = Path(__file__).parents[2] / "docs"
SESSIONS = [
    pytest.param(session, id=f"{page.name}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, session in enumerate(re.findall(r"```pycon\n(.*?)```", page.read_text(), re.S))
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    models = {name: cdlm.load(name, "cpu") for name in zoo.names()}
    server = uvicorn.Server(uvicorn.Config(create_app(models), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_goes_as_it_is_printed(session: str, address: str) -> None:
    text = session.replace("localhost:8000", address).replace('"my-model"', repr(str(zoo.HERE / "mdlm")))
    parsed = doctest.DocTestParser().get_doctest(text, {}, "session", None, None)
    assert parsed.examples
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(parsed, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
