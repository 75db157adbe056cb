"""What a plugin gets of its options, and what it says of wrong ones, by a model such as plugins have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

import piecework
from piecework import CompilationConfig, CompiledPiece, ConfigError, read_options, testing


class Tiles(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    width: int = 8
    height: int = 8


class FooOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tiles: Tiles = Tiles()
    limit_s: float = Field(default=1.0, gt=0)
    flags: list[str] = []

    @model_validator(mode="after")
    def check_tiles_are_flat(self) -> FooOptions:
        if self.tiles.height > self.tiles.width:
            raise ValueError("tiles must be flat")
        return self


def read(**given: Any) -> FooOptions:
    return read_options(FooOptions, CompilationConfig(plugin_options={"foo": given, "other": {"limit_s": 3}}), "foo")


def refusal(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**given)
    return str(caught.value)


def test_options_that_are_not_given_have_the_defaults_of_the_model() -> None:
    assert read_options(FooOptions, CompilationConfig(), "foo") == FooOptions()
    assert read() == FooOptions()
    assert read(limit_s=2.5, tiles={"width": 16}) == FooOptions(limit_s=2.5, tiles=Tiles(width=16))


def test_an_unknown_option_names_the_nearest_and_all_there_are() -> None:
    assert refusal(limits=2) == (
        "plugin_options['foo'].limits: there is no such option, got 2; did you mean 'limit_s'?; "
        "the options are tiles, limit_s, flags"
    )
    assert refusal(zzz=1) == (
        "plugin_options['foo'].zzz: there is no such option, got 1; the options are tiles, limit_s, flags"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"limit_s": "2"}, "plugin_options['foo'].limit_s: Input should be a valid number, got '2'; the options are "),
        ({"limit_s": 0}, "plugin_options['foo'].limit_s: Input should be greater than 0, got 0; "),
        ({"tiles": 3}, "plugin_options['foo'].tiles: Input should be a valid dictionary or instance of Tiles, got 3; "),
    ],
)
def test_a_wrong_value_is_said_where_it_was_given(given: dict[str, Any], words: str) -> None:
    assert refusal(**given).startswith(words)


def test_an_option_inside_of_another_is_named_by_its_path_and_its_neighbours() -> None:
    assert refusal(tiles={"widht": 16}) == (
        "plugin_options['foo'].tiles.widht: there is no such option, got 16; did you mean 'width'?; "
        "the options are width, height"
    )
    assert refusal(tiles={"height": 2.5}).startswith("plugin_options['foo'].tiles.height: ")
    assert refusal(flags=["a", 1]) == (
        "plugin_options['foo'].flags.1: Input should be a valid string, got 1; the options are tiles, limit_s, flags"
    )


def test_options_that_do_not_go_together_are_said_of_the_plugin() -> None:
    assert refusal(tiles={"height": 16}).startswith("plugin_options['foo']: Value error, tiles must be flat, got {")


def test_what_was_given_is_cut_to_fit_into_the_message() -> None:
    assert refusal(limit_s="long" * 100).count("long") < 51


def test_a_hook_reads_the_options_of_its_compilation_and_refuses_wrong_ones() -> None:
    seen: list[FooOptions] = []

    class Foo:
        name = "foo"

        @piecework.hookimpl
        def piecework_compile_piece(self, config: CompilationConfig) -> CompiledPiece | None:
            seen.append(read_options(FooOptions, config, self.name))
            return None

    def run(**given: Any) -> None:
        config = CompilationConfig(plugin_options={"foo": given}, splitting_ops=())
        piecework.compile(lambda x: x + 1, config=config)(torch.ones(2))

    with testing.plugins(Foo()):
        run(limit_s=2.0)
        with pytest.raises(ConfigError, match="did you mean 'limit_s'"):
            run(limit=2.0)
    assert seen == [FooOptions(limit_s=2.0)]
