# SPDX-License-Identifier: Apache-2.0
"""The pages tell the truth: links lead somewhere, tables equal the code, examples run as printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cecilia import errors
from server.config import Config
from server.engine_v1.routes import PREFIX, EngineRoutes
from server.errors import ENGINE_STATUS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(page for pattern in ("*.md", "docs/*.md", "models/*.md") for page in ROOT.glob(pattern))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PRINTED_ADDRESS = "127.0.0.1:9091"


API = (ROOT / "docs" / "API.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    """Return the fenced examples of a page in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table under a README heading: cells without back quotes, no header."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row] for row in rows[2:]]


def server(*arguments: str) -> str:
    """Return what `python -m server` prints for these flags, with no setting in the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CECILIA_")}
    command = [sys.executable, "-m", "server", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = []
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        good = target.exists() and (not anchor or anchor in anchors(target))
        if not good and not link.startswith("https://"):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"`[^`\n]+`|^ {4}.*$|^```.*?^```", text, re.M | re.S))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code))
    known = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert named <= known


def test_the_two_commands_come_first() -> None:
    assert re.findall(r"^ {4}(make \w+)", README, re.M)[:2] == ["make run", "make test"]


def test_exit_codes_are_those_of_the_errors() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {value.exit_code for value in classes if issubclass(value, errors.CeciliaError)}
    assert [row[0] for row in table("Exit codes")] == [str(code) for code in sorted(codes | {0})]


def test_the_flag_table_is_that_of_the_parser() -> None:
    flags = set(re.findall(r"--[a-z][a-z-]*", server("--help"))) - {"--help"}
    assert sorted(row[0] for row in table("Flags")) == sorted(flags)


def test_the_defaults_are_those_of_the_parser() -> None:
    printed = {flag: default for flag, default, _ in table("Flags")}
    settings = json.loads(server("--print-config", "--model", "models/there-is-none.l3r"))
    assert settings.pop("model")["source"] == "flag"
    assert printed["--model"] == Config().model
    for name, setting in settings.items():
        if setting["value"] is not None:
            shown = "no" if setting["value"] is False else str(setting["value"])
            assert printed["--" + name.replace("_", "-")] == shown


@pytest.fixture(scope="module")
def address(model_path: Path) -> Iterator[str]:
    """The host and port of a live server with the default model, on a port the system chose."""
    command = [sys.executable, "-m", "server", "--port", "0", "--model", str(model_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("service_ready"):
                break
        found = re.search(r"\d+\.\d+\.\d+\.\d+:\d+", lines[-1] if lines else "")
        try:
            assert found, "".join(lines)
            yield found.group()
        finally:
            process.terminate()
            process.communicate(timeout=30)


def run(command: list[str], example: str, address: str) -> str:
    """Run an example as printed, but against `address`; return what it writes."""
    assert PRINTED_ADDRESS in example
    command = [*command, example.replace(PRINTED_ADDRESS, address)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.model
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_examples(address: str) -> None:
    whole, streamed = (run(["bash", "-ec"], example, address) for example in blocks("sh"))
    answer = json.loads(whole)
    text = answer["choices"][0]["message"]["content"]
    assert "5" in text

    *data, done = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(line) for line in data]
    deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == text
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
    )


def test_the_api_page_names_every_route_and_code() -> None:
    service = mock.Mock(generations=mock.Mock(), clock=mock.Mock())
    routes = {path.removeprefix(PREFIX) for path in EngineRoutes(service, None).table()}
    section = API.split("\n## /engine/v1\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| `([a-z/]+)`(?: \*)? \| (?:GET|POST) \|", section, re.M)
    assert set(named) == routes
    for code, status in ENGINE_STATUS.items():
        (row,) = [line for line in API.splitlines() if re.match(rf"\| [\d, ]*\b{status}\b", line)]
        assert f"`{code}`" in row


@pytest.mark.model
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_of_the_api_page(address: str) -> None:
    (example,) = blocks("sh", API)
    chat, fork, status, tokens = _values(run(["bash", "-ec"], example, address))
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert fork["session_id"] == "sums-2"
    assert {"sums", "sums-2"} <= {entry["session_id"] for entry in status["entries"]}
    assert tokens["count"] == len(tokens["tokens"]) > 0


def _values(text: str) -> Iterator[Any]:
    """JSON values that stand one behind the other."""
    at, decoder = 0, json.JSONDecoder()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield value


@pytest.mark.model
def test_the_openai_example(address: str) -> None:
    (example,) = blocks("python")
    whole, streamed = run([sys.executable, "-c"], example, address).splitlines()
    assert "5" in whole
    assert streamed == whole
