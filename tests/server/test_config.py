# SPDX-License-Identifier: Apache-2.0
"""Flags, environment, and where each value comes from."""

from __future__ import annotations

import os

import pytest

from cecilia._kernels import threads
from cecilia.config import set_openmp_environment
from cecilia.engine.recipes import PROFILES
from cecilia.errors import UsageError
from cecilia.formats.residency import MODES
from server import config as settings
from server.config import Config, colour_wanted, read_command_line


def config(*argv: str, **environ: str) -> Config:
    return read_command_line(argv, environ).config


def test_the_choices_are_those_of_the_engine() -> None:
    """The server names them again, so that a flag is read without loading the kernels."""
    assert set(settings.PROFILES) == set(PROFILES)
    assert set(settings.WEIGHTS) == set(MODES)
    assert settings.MOST_THREADS == threads.MOST


def test_the_defaults() -> None:
    default = config()
    assert (default.host, default.port) == ("127.0.0.1", 9091)
    assert (default.model_id, default.context, default.threads) == (None, None, None)
    assert default.profile == "int8-v1"


def test_flag_over_environment_over_default() -> None:
    command = read_command_line(["--port", "1"], {"CECILIA_PORT": "2", "CECILIA_HOST": "::1"})
    assert (command.config.port, command.config.host) == (1, "::1")
    described = command.describe()
    assert described["port"] == {"value": 1, "source": "flag"}
    assert described["host"] == {"value": "::1", "source": "env"}
    assert described["context"] == {"value": None, "source": "default"}


@pytest.mark.parametrize(
    "name",
    [
        *("host", "port", "model", "model_id", "context", "threads", "profile", "force_context"),
        *("cache_size", "session_dir"),
    ],
)
def test_every_setting_has_an_environment_twin(name: str) -> None:
    known = {"port": "7", "context": "4K", "threads": "3", "profile": "f32", "force_context": "yes"}
    value = (known | {"cache_size": "2G"}).get(name, "x")
    by_flag = read_command_line(["--" + name.replace("_", "-"), value], {})
    by_env = read_command_line([], {"CECILIA_" + name.upper(): value})
    assert by_flag.config == by_env.config
    assert by_env.sources[name] == "env"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("65536", 65536),
        ("64K", 65536),
        ("64k", 65536),
        ("64Ki", 65536),
        ("64ki", 65536),
        ("4K", 4096),
        ("1", 1),
    ],
)
def test_contexts(text: str, tokens: int) -> None:
    assert config("--context", text).context == tokens


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("2gi", 2 << 30),
        ("1KiB", 1024),
        ("3B", 3),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert config("--cache-size", text).cache_size == nbytes


@pytest.mark.parametrize(
    ("flag", "value"),
    [("cache-size", value) for value in ("-1", "1.5G", "G", "2T", "5i", "01", "")]
    + [("context", value) for value in ("0", "-1", "4M", "4.5K", "K", "64KB", "\u0664K", "", "9999999999")]
    + [("port", value) for value in ("65536", "-1", "http", "")]
    + [("threads", value) for value in ("0", "65", "two", "Auto")]
    + [("profile", "int4"), ("host", ""), ("model-id", "a\nb"), ("force-context", "maybe")],
)
def test_bad_values_name_the_flag(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--{flag} must be") as caught:
        config(f"--{flag}={value}")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(UsageError, match="CECILIA_PORT must be"):
        config(CECILIA_PORT="x")


@pytest.mark.parametrize(
    ("wrong", "right"), [("--prot=1", "--port"), ("--thread", "--threads"), ("--modelid", "--model-id")]
)
def test_a_mistyped_flag(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {right}\\?"):
        config(wrong)


@pytest.mark.parametrize("wrong", ["--zzzzzzzz", "stray", "--po"])
def test_flags_are_not_abbreviated_or_guessed(wrong: str) -> None:
    with pytest.raises(UsageError, match="unknown argument"):
        config(wrong)


def test_a_missing_value() -> None:
    with pytest.raises(UsageError, match="--port"):
        config("--port")


def test_actions() -> None:
    assert read_command_line([], {}).action == "serve"
    assert read_command_line(["--threads", "auto"], {"CECILIA_THREADS": "3"}).config.threads is None
    assert read_command_line(["--check"], {}).action == "check"
    assert read_command_line(["--print-config", "--port", "1"], {}).action == "print_config"


def test_no_color() -> None:
    assert colour_wanted(True, {})
    assert not colour_wanted(True, {"NO_COLOR": "1"})
    assert not colour_wanted(False, {})


def test_openmp_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    set_openmp_environment()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    # The two values the OpenMP standard knows.
    assert os.environ["OMP_WAIT_POLICY"] in ("active", "passive")
