"""The settings of one compilation: the environment beats the argument beats the process beats the default.

No other module reads the environment; all functions here read it anew, and none runs at import or on the hot path.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import platformdirs

from piecework.config import CompilationConfig
from piecework.config_checks import LEVEL_CHOICES, CompilationLevel, Size, check_custom_ops, find_level, show
from piecework.errors import ConfigError
from piecework.process_settings import (
    attention_ops,
    check_config,
    compilation_config,
    compile_context,
    reset_process_settings,
    set_attention_ops,
    set_compilation_config,
    set_compile_context,
    set_torch_compile_backend,
    torch_compile_backend,
)

__all__ = [
    "ENVIRONMENT",
    "CompilationConfig",
    "CompilationLevel",
    "Settings",
    "Size",
    "apply_logging_level",
    "attention_ops",
    "cache_dir",
    "compilation_config",
    "compile_context",
    "plugin_selection",
    "read_environment",
    "reset_process_settings",
    "resolve_settings",
    "set_attention_ops",
    "set_compilation_config",
    "set_compile_context",
    "set_torch_compile_backend",
    "torch_compile_backend",
    "triton_is_interpreted",
]

ENVIRONMENT = (
    "PIECEWORK_LEVEL",
    "PIECEWORK_CONFIG",
    "PIECEWORK_CUSTOM_OPS",
    "PIECEWORK_PLUGINS",
    "PIECEWORK_CACHE_DIR",
    "PIECEWORK_LOGGING_LEVEL",
    "PIECEWORK_DEBUG",
)
"""Every variable that Piecework reads. An empty one is as good as unset, except ``PIECEWORK_PLUGINS``."""


@dataclass(frozen=True)
class Settings:
    """What one compilation goes by, and who decided each field."""

    config: CompilationConfig
    """Its ``level`` is never None."""
    origins: Mapping[str, str]
    """By field: ``"default"``, ``"set_compilation_config"``, ``"argument"``, ``"PIECEWORK_CONFIG"``,
    ``"PIECEWORK_LEVEL"``, ``"PIECEWORK_CUSTOM_OPS"`` or ``"PIECEWORK_DEBUG"``."""
    is_debug: bool = False
    """``PIECEWORK_DEBUG``: every call and every replay is checked."""

    @property
    def level(self) -> CompilationLevel:
        """The level to compile at."""
        assert self.config.level is not None
        return self.config.level


def resolve_settings(argument: CompilationConfig | None, *, default_level: CompilationLevel) -> Settings:
    """Decide every field, from the strongest source that gives it; called once per compilation.

    Also applies ``PIECEWORK_LOGGING_LEVEL``, so that whatever compiles is logged as asked for.

    Args:
        argument: the ``config`` of the call that compiles.
        default_level: the level where no source names one.

    Raises:
        ConfigError: a variable or the argument is not usable.
    """
    apply_logging_level()
    level = environment_level()
    sources = {
        "set_compilation_config": compilation_config(),
        "argument": check_config(argument, "config"),
        "PIECEWORK_CONFIG": environment_config(),
        "PIECEWORK_LEVEL": None if level is None else CompilationConfig(level=level),
        "PIECEWORK_CUSTOM_OPS": environment_custom_ops(),
    }
    values: dict[str, object] = {}
    origins = dict.fromkeys(CompilationConfig.model_fields, "default")
    for source, config in sources.items():
        if config is not None:
            values.update(config.given())
            origins.update(dict.fromkeys(config.given(), source))
    if values.get("level") is None:
        values["level"] = default_level
    is_debug = environment_debug()
    if is_debug:
        # A sample of addresses would let a call read what another one finds.
        values["check_parameters"] = "always"
        origins["check_parameters"] = "PIECEWORK_DEBUG"
    return Settings(CompilationConfig(**values), MappingProxyType(origins), is_debug)


def environment_level() -> CompilationLevel | None:
    """Return what ``PIECEWORK_LEVEL`` says, None if unset."""
    text = os.environ.get("PIECEWORK_LEVEL")
    if not text:
        return None
    # Not int(): it takes ' 2 ', '0_2' and the digits of every script.
    level = CompilationLevel(int(text)) if text in ("0", "1", "2", "3") else find_level(text)
    if level is None:
        raise ConfigError(f"PIECEWORK_LEVEL must be one of {LEVEL_CHOICES}, got {show(text)}")
    return level


def environment_config() -> CompilationConfig | None:
    """Return what ``PIECEWORK_CONFIG`` holds, or the file that it names; None if unset."""
    text = os.environ.get("PIECEWORK_CONFIG")
    if not text:
        return None
    if text.lstrip().startswith("{"):
        return CompilationConfig.from_json(text, source="PIECEWORK_CONFIG")
    try:
        content = Path(text).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            'PIECEWORK_CONFIG must be a JSON object such as {"level": 3}, or the path of a file holding one '
            f"such as ./piecework.json; got {show(text)}, which can't be read as a file: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"PIECEWORK_CONFIG must name a file of UTF-8 text, got {show(text)}: {error}") from error
    return CompilationConfig.from_json(content, source=f"PIECEWORK_CONFIG (file {text!r})")


def environment_custom_ops() -> CompilationConfig | None:
    """Return a config of the tokens in ``PIECEWORK_CUSTOM_OPS``; None if unset."""
    text = os.environ.get("PIECEWORK_CUSTOM_OPS")
    return CompilationConfig(custom_ops=check_custom_ops(text, "PIECEWORK_CUSTOM_OPS")) if text else None


def environment_debug() -> bool:
    """Return whether ``PIECEWORK_DEBUG`` switches debug mode on."""
    text = os.environ.get("PIECEWORK_DEBUG")
    if text not in (None, "", "0", "1"):
        raise ConfigError(f"PIECEWORK_DEBUG must be 0 (off, as when it is unset) or 1 (on), got {show(text)}")
    return text == "1"


def triton_is_interpreted() -> bool:
    """Whether ``TRITON_INTERPRET`` has Triton run kernels on the CPU; Triton itself reads it when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def plugin_selection() -> str | None:
    """Return ``PIECEWORK_PLUGINS`` as it stands: None (all) and ``""`` (none) differ."""
    return os.environ.get("PIECEWORK_PLUGINS")


def cache_dir() -> Path:
    """Return where artifacts live: ``PIECEWORK_CACHE_DIR``, by default the platform's folder for caches."""
    text = os.environ.get("PIECEWORK_CACHE_DIR")
    return Path(text) if text else platformdirs.user_cache_path("piecework")


def read_environment() -> dict[str, str | None]:
    """Return the variables of ``ENVIRONMENT``, None where unset, and after them any other that begins like them."""
    others = sorted(name for name in os.environ if name.startswith("PIECEWORK_") and name not in ENVIRONMENT)
    return {name: os.environ.get(name) for name in (*ENVIRONMENT, *others)}


def apply_logging_level() -> None:
    """Give the ``piecework`` logger the level that ``PIECEWORK_LOGGING_LEVEL`` names; unset, leave it alone.

    Where the program has set up no logging at all, records go to stderr.

    Raises:
        ConfigError: neither a level's name nor a number.
    """
    text = os.environ.get("PIECEWORK_LOGGING_LEVEL")
    if not text:
        return
    # Gives the number for a name, and a string for anything else.
    level = int(text) if re.fullmatch("[0-9]{1,9}", text) else logging.getLevelName(text.upper())
    if not isinstance(level, int):
        raise ConfigError(
            "PIECEWORK_LOGGING_LEVEL must be a level of logging (DEBUG, INFO, WARNING, ERROR, CRITICAL) "
            f"or a number, got {show(text)}"
        )
    logger = logging.getLogger("piecework")
    logger.setLevel(level)
    if not logger.handlers and not logging.getLogger().handlers:
        logger.addHandler(make_stderr_handler())


def make_stderr_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    # A program that sets up logging later would see each record twice.
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    return handler
