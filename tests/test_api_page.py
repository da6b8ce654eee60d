"""docs/api.md has every public name of the in-process router, with its signature and defaults."""

import inspect
import re
from functools import cached_property
from pathlib import Path

import pytest

import kvplug
from kvplug import BlockIndex, CxlState, Namespace, Rank, Router, Tier, errors
from kvplug.errors import KvplugError
from kvplug.index.prefix_query import Overlap
from kvplug.ingest.event_thread import EventThread
from kvplug.router.options import RequestOptions, RouteOptions

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
# Their tables are complete; of other classes what a reader needs.
COMPLETE = (Router, EventThread)


def sections():
    """(object, its part of the page) for each heading with an import below it."""
    parts = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]
    for part in parts:
        if imported := re.search(r"^`(from [\w.]+ import (\w+))`$", part, re.MULTILINE):
            names = {}
            exec(imported[1], names)
            yield pytest.param(names[imported[2]], part, id=imported[2])


SECTIONS = list(sections())


def rows(part, head):
    """The cells of all tables with this first column."""
    tables = [table.partition("\n\n")[0] for table in part.split(f"\n| {head} |")[1:]]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
        for table in tables
        for line in table.splitlines()[2:]
    ]


def shown(parameter):
    """A parameter as the page has it."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    name = stars.get(parameter.kind, "") + parameter.name
    default = parameter.default
    if default is parameter.empty:
        return name
    if default == Namespace():
        return f"{name}=Namespace()"
    return f"{name}={'...' if callable(default) or isinstance(default, dict) else repr(default)}"


def signature_of(name, member):
    """`name(parameters)` as the page has it; the name alone for a property."""
    if isinstance(member, property | cached_property):
        return name
    parts, is_keyword_only = [], False
    for parameter in inspect.signature(member).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            parts.append("*")
        parts.append(shown(parameter))
    return f"{name}({', '.join(parts)})"


@pytest.mark.parametrize(("documented", "part"), SECTIONS)
def test_calls_have_the_signatures_of_the_page(documented, part):
    calls = [call.strip("`") for call, *_ in rows(part, "call")]
    for call in calls:
        name = call.partition("(")[0]
        is_constructor = name == documented.__name__
        member = documented if is_constructor else inspect.getattr_static(documented, name)
        if isinstance(member, classmethod):
            member = member.__get__(None, documented)
        assert call == signature_of(name, member)
    if documented in COMPLETE:
        public = {name for name in dir(documented) if not name.startswith("_")}
        assert {call.partition("(")[0] for call in calls} - {documented.__name__} == public


@pytest.mark.parametrize(("documented", "part"), SECTIONS)
def test_fields_have_the_defaults_of_the_page(documented, part):
    fields = rows(part, "field")
    if not fields:
        return
    parameters = inspect.signature(documented).parameters
    assert [name.strip("`") for name, *_ in fields] == list(parameters)
    for (name, default, _), parameter in zip(fields, parameters.values(), strict=True):
        if parameter.default is parameter.empty:
            assert default == "", name
        elif name == "`skipped`":
            assert default == "{}"  # msgspec makes a dict for each batch
        else:
            names = {"Tier": Tier, "CxlState": CxlState}
            assert eval(default, names) == parameter.default, name


@pytest.mark.parametrize(("documented", "part"), SECTIONS)
def test_attributes_of_the_page_exist(documented, part):
    known = {*dir(documented), *getattr(documented, "__annotations__", {})}
    for name, *_ in rows(part, "attribute"):
        assert name.strip("`") in known


def test_parameters_of_route_are_explained():
    names = [name.strip("`") for name, _ in rows(PAGE, "parameter")]
    named = [*inspect.signature(Router.route).parameters][1:-1]
    assert names == [*named, *RouteOptions.__annotations__]
    assert [*RouteOptions.__annotations__] == [*inspect.signature(RequestOptions).parameters]


def test_tiers_and_errors_are_complete():
    assert [name.strip("`") for name, _ in rows(PAGE, "member")] == [tier.name for tier in Tier]
    known = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and name != "KvplugError"
    }
    assert {name.strip("`") for name, _ in rows(PAGE, "error")} == known


def test_every_exported_name_is_on_the_page():
    headings = set(re.findall(r"^##+ (\w+)$", PAGE, re.MULTILINE))
    for name in set(kvplug.__all__) - headings - {"KvplugError", "__version__"}:
        exported = getattr(kvplug, name)
        if inspect.isfunction(exported):
            assert f"`kvplug.{name}(" in PAGE, name
        else:  # test_tiers_and_errors_are_complete
            assert issubclass(exported, KvplugError), name


def test_every_error_can_be_imported_from_the_package():
    known = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert known <= set(kvplug.__all__)


def test_states_of_pools_are_complete():
    assert [name.strip("`") for name, _ in rows(PAGE, "state")] == [each.name for each in CxlState]


def test_numbers_of_ranks_are_positions_in_an_overlap():
    index = BlockIndex(block_size=4)
    number = index.add_rank(Rank("a"))
    overlap = index.overlap([1, 2])
    assert isinstance(overlap, Overlap)
    assert overlap.depth[number] == overlap.held[number] == 0
