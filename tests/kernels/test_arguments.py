"""How many arguments a kernel, or a part of kernels, takes: more say that arrays want a bundle."""

import ast
from pathlib import Path

import pytest

import kvplug.kernels

FILES = sorted(Path(kvplug.kernels.__file__).parent.glob("*.py"))
MAX_ARGUMENTS = 8


def num_arguments(function):
    named = function.args
    several = [each for each in (named.vararg, named.kwarg) if each]
    return len([*named.posonlyargs, *named.args, *named.kwonlyargs, *several])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_function_takes_eight_arguments_at_most(path):
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    too_many = {f.name: num_arguments(f) for f in functions if num_arguments(f) > MAX_ARGUMENTS}
    assert not too_many
