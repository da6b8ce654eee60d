"""Which form of message content a chat template reads: one string, or a list of typed parts.

In:  the syntax tree of a template.   Out: "string" or "openai", as vLLM 0.32 guesses it.
"""

from __future__ import annotations

from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]
"""What `message.content` is inside a template: one string, or a list of typed parts."""


class _UnnamedTargetError(Exception):
    """A loop or an assignment of interest has a target that is no plain name."""


def content_format(tree: nodes.Template) -> ContentFormat:
    """Answer "openai" if the template loops over the content of a message, as vLLM guesses it.

    It is a guess from the text: `{% for part in message.content %}` says yes, and so does a loop
    over a macro's parameter that receives `message.content` somewhere.
    """
    try:
        messages = _message_names(tree)
        parameters = _macro_loops(tree, messages)
        for loop in tree.find_all(nodes.For):
            if _walks_content(loop, messages, parameters):
                _name(loop.target)
                return "openai"
    except _UnnamedTargetError:
        pass
    return "string"


def _message_names(tree: nodes.Template) -> list[str]:
    """Name the variables that loops over `messages`, or over an alias of it, give to a message."""
    aliases = ["messages"]
    for alias in aliases:  # grows while it is walked
        for assignment in tree.find_all(nodes.Assign):
            if reads(assignment.node, alias) and _name(assignment.target) not in aliases:
                aliases.append(_name(assignment.target))
    loops = tree.find_all(nodes.For)
    return [_name(it.target) for it in loops if any(reads(it.iter, alias) for alias in aliases)]


def _macro_loops(tree: nodes.Template, messages: list[str]) -> dict[int, set[str]]:
    """Map each loop inside a macro (its id) to the parameters that may hold a message's content."""
    parameters: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        found = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            parameters[id(loop)] = found or parameters.get(id(loop), set())
    return parameters


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    names = [parameter.name for parameter in macro.args]
    found = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given: list[tuple[str, nodes.Node]] = [*zip(names, call.args, strict=False)]
            given += [(pair.key, pair.value) for pair in call.kwargs if pair.key in names]
            found |= {name for name, value in given if _reads_content(value, messages)}
    return found


def _walks_content(loop: nodes.For, messages: list[str], parameters: dict[int, set[str]]) -> bool:
    if _reads_content(loop.iter, messages):
        return True
    # Outside of macros a variable called `content` is taken for the content of a message.
    names = parameters.get(id(loop), {"content"})
    return isinstance(loop.iter, nodes.Name) and loop.iter.name in names


def _reads_content(node: nodes.Node, messages: list[str]) -> bool:
    return any(reads(node, message, "content") for message in messages)


def reads(node: nodes.Node | None, name: str, field: str | None = None) -> bool:
    """Say whether the node is variable `name`, or its `field`: plain, filtered or sliced."""
    node = _unwrapped(node)
    if field is None:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getattr):
        return node.attr == field and _is_variable(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == field and _is_variable(node.node, name)
    return False


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnnamedTargetError
    return target.name
