"""The public surface, frozen: whoever adds a name changes this file, and says why in the commit."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import piecework
from piecework.config import CompilationConfig
from piecework.counting import Counters
from piecework.implementations import hook_arguments
from piecework.settings import ENVIRONMENT

CORE = Path(piecework.__file__).parent
ROOT = CORE.parents[1]


def test_exported_names() -> None:
    assert set(piecework.__all__) == {
        *("compile", "support_torch_compile", "ignore_torch_compile", "release", "report", "reset"),
        *("capture", "freeze"),
        *("set_attention_ops", "set_compilation_config", "set_compile_context", "set_torch_compile_backend"),
        *(
            "verify",
            "Verification",
            "verify_assumptions",
            "counters",
            "CompilationConfig",
            "CompilationLevel",
            "Report",
        ),
        *("PieceworkError", "ConfigError", "PluginError", "SplitError", "CompileError", "TraceDepartureError"),
        *("GradientNotSupported", "PieceworkWarning"),
        *("hookimpl", "read_options", "Piece", "InputKind", "SplittingOp", "CompiledPiece"),
        *("CustomOp", "CustomOpImplementation", "Limits"),
        *("Capturer", "Capture", "CaptureMemory", "Recordable", "CaptureError", "StaleCaptureError"),
    }
    for name in piecework.__all__:
        assert getattr(piecework, name) is not None


def test_hooks_and_their_arguments() -> None:
    assert {hook: tuple(arguments) for hook, arguments in hook_arguments().items()} == {
        "piecework_custom_op_enabled": ("op_name", "level", "config"),
        "piecework_custom_op_implementations": ("op_name", "device"),
        "piecework_splitting_ops": ("config",),
        "piecework_compile_piece": ("piece", "config"),
        "piecework_capturer": ("device", "config"),
    }


def test_config_fields() -> None:
    assert set(CompilationConfig.model_fields) == {
        *("level", "splitting_ops", "compile_sizes", "check_parameters", "on_failure", "piece_compiler"),
        *("plugin_options", "capturer", "capture_sizes", "max_padding_ratio", "rows_independent"),
        *("max_capture_bytes", "static_inputs", "static_outputs", "custom_ops"),
    }


def test_environment_variables() -> None:
    assert set(ENVIRONMENT) == {
        *("PIECEWORK_LEVEL", "PIECEWORK_CONFIG", "PIECEWORK_PLUGINS", "PIECEWORK_CACHE_DIR"),
        *("PIECEWORK_LOGGING_LEVEL", "PIECEWORK_CUSTOM_OPS", "PIECEWORK_DEBUG"),
    }


def test_counters() -> None:
    assert set(Counters().snapshot()) == {
        *("num_graphs_seen", "num_pieces_seen", "num_capturable_pieces_seen", "num_unique_pieces"),
        *("num_piece_compilations", "num_graph_captures", "num_graph_replays"),
    }


def test_every_setting_is_in_the_documents() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    for name in (*CompilationConfig.model_fields, *ENVIRONMENT):
        assert f"`{name}`" in text, name


def test_hooks_are_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for hook, arguments in hook_arguments().items():
        assert f"`{hook}({', '.join(arguments)})`" in text


def test_the_core_names_no_plugin() -> None:
    names = [path.name for path in (ROOT / "plugins").iterdir() if path.is_dir()]
    assert names
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imported = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not any(f"piecework_{name}" in module for name in names for module in imported), path


def test_one_module_of_the_core_touches_underscored_torch() -> None:
    private = re.compile(r"\btorch(\.\w+)*\._(?!_)|\bfrom torch[\w.]* import .*\b_(?!_)")
    allowed = {"torch_internals.py"}
    for path in CORE.rglob("*.py"):
        if path.name not in allowed:
            code = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
            assert not private.findall(code), path
