"""Reads the C++ wrapper that Inductor wrote as plain data: its calls to us, and where it names a lent weight.

Every statement that names a weight, under its own name or an alias, must be of a kind that is known here: a new
spelling must not hide a read. Unknown statements are listed for the caller to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

# What the wrapper calls: for each access, and after the launches of each step.
FETCH = "penstock_weight"
STEP_END = "penstock_done"


@dataclass(frozen=True)
class Call:
    """A call of ours: a fetch of an access, or the end of a step."""

    kind: str  # "access" or "end of step"
    number: int


@dataclass(frozen=True)
class Mention:
    """A read of one or more lent weights through `name`, after `calls_before` of our calls."""

    name: str
    accesses: frozenset[int]
    calls_before: int


@dataclass(frozen=True)
class UnknownStatement:
    """A statement that names a weight or a call of ours, and is of no kind that is known here."""

    line: str
    accesses: frozenset[int]


@dataclass
class WrapperText:
    calls: list[Call] = field(default_factory=list)
    mentions: list[Mention] = field(default_factory=list)
    unknown: list[UnknownStatement] = field(default_factory=list)


@dataclass(frozen=True)
class Constants:
    count: int
    names: tuple[str, ...]


_BODY = re.compile(r"::run_impl\(\s*AtenTensorHandle.*?\)\s*\{(.*)\}\s*//\s*\w+::run_impl", re.DOTALL)
_CONSTANT_NAME = re.compile(r'constants_info_\[\d+\]\.original_fqn = "([^"]*)"')
_CONSTANTS = re.compile(r"AOTInductorModelBase\(\s*\d+\s*,\s*\d+\s*,\s*(\d+)\s*,")
# Comments, and literals in which a brace or a semicolon means nothing.
_QUOTED = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|R"(?P<end>[^\s()\\]*)\(.*?\)(?P=end)"'
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'",
    re.DOTALL,
)
_WORD = re.compile(r"\b[A-Za-z_]\w*")
_BRACKET = re.compile(r"[()\[\]{};]")
# What stands before a parenthesis or a brace: a name that is called or built, or a cast of a pointer.
_CALLED = re.compile(r"([A-Za-z_][\w:]*)\s*(?:<[^<>(){}]*>)?\s*")
_CAST = re.compile(r"\((?:const\s+)?[\w:]+\s*\*+\s*\)\s*")
_CHECKED = re.compile(r"AOTI_TORCH_ERROR_CODE_CHECK\((.*)\)", re.DOTALL)
_CALL = re.compile(r"([A-Za-z_][\w.]*)\((.*)\)", re.DOTALL)
_RESULT = re.compile(r"&\s*(\w+)")

_PROXY_CALL = "aoti_torch_proxy_executor_call_function("
_FETCH_CALL = re.compile(rf"aoti_torch_[a-z]+_{FETCH}\(\s*(\d+)L?\b[^;]*,\s*&(\w+)\s*\)", re.DOTALL)
_STEP_END_CALL = re.compile(rf"{STEP_END}\(\s*(\d+)L?\s*\)")

_TYPE = r"(?:const\s+)?(?:auto|AtenTensorHandle|RAIIAtenTensorHandle|ConstantHandle|CUdeviceptr|void)"
_DECLARED = re.compile(rf"{_TYPE}\s*[*&]*\s+[*&]*(\w+)(?:\[\w*\])?")
_NAMED = re.compile(rf"{_DECLARED.pattern}\s*(?:=(?P<value>.*)|\((?P<argument>.*)\)|\{{(?P<held>.*)\}})", re.DOTALL)
_ASSIGNED = re.compile(r"(\w+)(?:\[\d+\])?\s*=(?!=)(.*)", re.DOTALL)
_RELEASED = re.compile(r"\w+\.reset\(\)|(?:AOTI_TORCH_ERROR_CODE_CHECK\()?aoti_torch_delete_tensor_object\(\w+\)+")
# These ask for the shape and the address of a tensor, not for its content.
_ASKED = re.compile(r"(?:assert_size_stride|assert_numel|assert_alignment)\([^;]*\)")


def _words(text: str, prefix: str = "") -> frozenset[str]:
    return frozenset(prefix + word for word in text.split())


# Give another name to the same memory, or to its address, as a part of any statement.
_SHOWN_BY = _words(
    "std::move std::array std::vector reinterpret_tensor_wrapper wrap_with_raii_handle_if_needed RAIIAtenTensorHandle "
    "ConstantHandle borrow_arrayref_tensor_as_tensor copy_arrayref_tensor_to_tensor reinterpret_cast static_cast "
    "temporary_reference unwrap_raii_handle_if_needed get_data_ptr_wrapper data_ptr get data cbegin release"
)
# Functions of AOTInductor's C ABI whose result (passed by address) shares the memory of an argument.
VIEW_SHIMS = _words(
    "_reinterpret_tensor new_tensor_handle assign_tensors_out as_strided get_data_ptr", prefix="aoti_torch_"
)
_DESCRIPTOR = re.compile(r"init(?:\dD)?TMADescriptor")
# Functions that read or write, and keep nothing. Ops behind the proxy are not named here: the record knows from their
# schemas whether their results are views.
READER_SHIMS = _words(
    "clone clone_preserve_strides copy_ index_put_out scatter_out scatter_reduce_out _mm_plus_mm_out "
    "proxy_executor_call_function print_tensor_handle save_tensor_handle check_inf_and_nan "
    "item_float16 item_float32 item_float64 item_bfloat16 item_complex64 item_bool "
    "item_int8 item_int16 item_int32 item_int64 item_uint8 item_uint16 item_uint32 item_uint64",
    prefix="aoti_torch_",
)
# Host code of Inductor's own kernels; on a GPU each has a function that launches it.
_KERNEL = re.compile(r"cpp_\w+|call_\w+|kernels\.\w+")
_OP = re.compile(r"aoti_torch_(?:cpu|cuda|aten)_(\w+)")
# Shims for which this build of torch, or every build, registers no op of the same name. None gives a view.
OPS_OF_OTHER_NAMES = _words(
    "_mkl_linear _qconv2d_pointwise_binary_tensor _qconv_pointwise_tensor _qlinear_pointwise_binary_tensor "
    "_qlinear_pointwise_tensor _weight_int4pack_mm_cpu_tensor mkldnn__convolution_pointwise_binary_"
)


def is_wrapper(file: str) -> bool:
    """Whether a compiler's file is the generated wrapper, by its name."""
    return file.endswith("wrapper.cpp")


def archived_wrappers(members: Iterable[str], method: str) -> list[str]:
    """The wrappers of a method among the members of a .pt2; there should be one."""
    return [name for name in members if f"/data/aotinductor/{method}/" in name and is_wrapper(name)]


def read_wrapper(source: str) -> WrapperText | None:
    """None where there is no run_impl to read."""
    match = _BODY.search(source)
    if match is None:
        return None
    reader = _Reader()
    for kind, statement, line in _statements(match.group(1)):
        reader.read(kind, statement, line)
    return reader.found


def input_uses(source: str, position: int) -> list[str] | None:
    """The statements of the run function that use one of its inputs, except those that hand it to ops as it is, ask for
    its size, release it, or copy it if it does not begin at a multiple of 16 bytes, as code for a GPU does (our states
    begin at one). None if the input is not found."""
    match = _BODY.search(source)
    statements = [] if match is None else list(_statements(match.group(1)))
    taken = re.compile(rf"auto (\w+) = std::move\(inputs\[{position}\]\)")
    names = [found[1] for _, text, _ in statements if (found := taken.fullmatch(text)) is not None]
    if len(names) != 1:
        return None
    word, handed = re.compile(rf"\b{names[0]}\b"), re.compile(rf"[{{,]\s*{names[0]}(?=\s*[,}}])")
    return [
        line
        for _, text, line in _without_aligning(statements, names[0])
        if (mentions := len(word.findall(text)))
        and not taken.fullmatch(text)
        and not _RELEASED.fullmatch(text)
        and not _ASKED.fullmatch(text)
        and not (_PROXY_CALL in text and len(handed.findall(text)) == mentions)
    ]


def _without_aligning(statements: list[tuple[str, str, str]], name: str) -> Iterator[tuple[str, str, str]]:
    """All statements except the blocks, as Inductor writes them, that copy an input to aligned memory."""
    misaligned = f"if ((reinterpret_cast<std::uintptr_t>({name}.data_ptr()) & (16 -1)) != 0)"
    copied = [
        "AOTI_TORCH_WARN",
        f"AtenTensorHandle {name}_aligned",
        f"aoti_torch_clone_preserve_strides({name}, &{name}_aligned)",
        f"{name} = std::move(RAIIAtenTensorHandle({name}_aligned))",
        # The end of a block: nothing before its brace, and the brace.
        "",
        "",
    ]
    position = 0
    while position < len(statements):
        kind, text, _ = statements[position]
        inside = [re.sub(r"\(\s*\)", "", text) for _, text, _ in statements[position + 1 :][: len(copied)]]
        if kind == "open" and text == misaligned and inside == copied:
            position += 1 + len(copied)
        else:
            yield statements[position]
            position += 1


def read_constants(source: str) -> Constants | None:
    """None where the wrapper does not say how many constants it has."""
    match = _CONSTANTS.search(source)
    return None if match is None else Constants(int(match.group(1)), tuple(_CONSTANT_NAME.findall(source)))


def _statements(body: str) -> Iterator[tuple[str, str, str]]:
    """What ends at a semicolon ("statement"), what comes before a block ("open"), and the end of a block ("close"):
    each with the text to read and the text as written."""
    # Blanked, not removed: positions must stay.
    text = _QUOTED.sub(lambda match: " " * len(match.group()), body)
    start = nested = 0
    for bracket in _BRACKET.finditer(text):
        position, character = bracket.start(), bracket.group()
        if character in "([":
            nested += 1
        elif character in ")]":
            nested -= 1
        elif character == "{":
            before = text[start:position].rstrip()
            # A brace after a name or an operator holds values; a block comes after a condition, or by itself.
            if nested == 0 and (not before or before[-1] in ")]" or re.search(r"\b(?:else|do|try)$", before)):
                yield "open", before.strip(), body[start:position].strip()
                start = position + 1
            else:
                nested += 1
        elif character == "}" and nested > 0:
            nested -= 1
        elif (character == ";" or character == "}") and nested == 0:
            yield "statement", text[start:position].strip(), body[start:position].strip()
            if character == "}":
                yield "close", "", ""
            start = position + 1
    yield "statement", text[start:].strip(), body[start:].strip()


class _Reader:
    def __init__(self) -> None:
        self.found = WrapperText()
        # Name -> the accesses whose memory it shows; one table per open block.
        self._scopes: list[dict[str, frozenset[int]]] = [{}]

    def read(self, kind: str, text: str, line: str) -> None:
        names = [word for word in dict.fromkeys(_WORD.findall(text)) if self._shown(word)]
        accesses = frozenset[int]().union(*map(self._shown, names))
        known = self._read_call(text) if kind == "statement" else False
        if not known and (names or FETCH in text or STEP_END in text):
            known = kind == "statement" and FETCH not in text and STEP_END not in text
            known = known and self._read_mention(text, names, accesses)
            if not known:
                self.found.unknown.append(UnknownStatement(" ".join(line.split()), accesses))
        if kind == "open":
            self._scopes.append({})
        elif kind == "close" and len(self._scopes) > 1:
            self._scopes.pop()

    def _read_call(self, text: str) -> bool:
        """Reads our own calls. They are in no block, so what is between them in the text also runs between them."""
        if len(self._scopes) > 1:
            return False
        checked = _CHECKED.fullmatch(text)
        fetch = _FETCH_CALL.fullmatch(checked[1].strip()) if checked else None
        if fetch is not None:
            self.found.calls.append(Call("access", int(fetch[1])))
            self._scopes[0][fetch[2]] = frozenset([int(fetch[1])])
            return True
        end = _STEP_END_CALL.fullmatch(text)
        if end is not None:
            self.found.calls.append(Call("end of step", int(end[1])))
        return end is not None

    def _read_mention(self, text: str, names: list[str], accesses: frozenset[int]) -> bool:
        """Whether the statement is of a known kind; new names for the memory are noted."""
        if _RELEASED.fullmatch(text) or _ASKED.fullmatch(text):
            return True
        declared = _DECLARED.fullmatch(text)
        if declared is not None:  # a new variable in an inner block, under the same name
            self._scopes[-1][declared[1]] = frozenset()
            return True
        self.found.mentions.extend(Mention(name, self._shown(name), len(self.found.calls)) for name in names)
        named = _NAMED.fullmatch(text)
        if named is not None:
            value = named["value"] or named["argument"] or named["held"] or ""
            self._scopes[-1][named[1]] = accesses
            return _shows(value, names)
        assigned = _ASSIGNED.fullmatch(text)
        if assigned is not None:
            # It may be in a branch that is not taken, so the name may still show what it showed before.
            self._add(assigned[1], accesses)
            return _shows(assigned[2], names)
        checked = _CHECKED.fullmatch(text)
        call = _CALL.fullmatch(checked[1].strip() if checked else text)
        if call is None or not _shows(call[2], names):
            return False
        view = _gives_view(call[1])
        if view:
            for result in _RESULT.findall(call[2]):
                self._add(result, accesses)
        return view is not None

    def _shown(self, name: str) -> frozenset[int]:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), frozenset())

    def _add(self, name: str, accesses: frozenset[int]) -> None:
        # If the name showed no weight so far, nobody knows where it was declared: maybe outside of every block.
        scope = next((scope for scope in reversed(self._scopes) if name in scope), self._scopes[0])
        scope[name] = scope.get(name, frozenset()) | accesses


def _shows(expression: str, names: list[str]) -> bool:
    """Whether an expression does no more with the named tensors than give another handle or their address. What it does
    with sizes and numbers does not matter."""
    held: list[int] = []
    for bracket in re.finditer(r"[(){}]", expression):
        if bracket.group() in "({":
            held.append(bracket.start())
        elif held:
            opened = held.pop()
            before = expression[:opened].rstrip()
            called = re.search(_CALLED.pattern + "$", before)
            inside = set(_WORD.findall(expression[opened : bracket.start()]))
            method = called is not None and re.search(r"(?:\.|->)\s*$", before[: called.start()]) is not None
            if inside.isdisjoint(names) and not method:
                continue
            grouped = not before or before[-1] in "(,{=*&+-/"
            cast = re.search(_CAST.pattern + "$", before) is not None
            if not (grouped or cast or (called is not None and called[1] in _SHOWN_BY)):
                return False
    return not held


def _gives_view(function: str) -> bool | None:
    """Whether the results of a function show the memory of its arguments; None for one that is not known."""
    if function in VIEW_SHIMS or _DESCRIPTOR.fullmatch(function):
        return True
    if function in READER_SHIMS or _KERNEL.fullmatch(function):
        return False
    op = _OP.fullmatch(function)
    return None if op is None else op_gives_view(op[1])


def op_gives_view(shim: str) -> bool | None:
    """By the schema of the op that a shim calls, as in "mm_out" and "view_dtype"; None where there is no such op."""
    name = re.sub(r"_v\d+$", "", shim)
    return False if name in OPS_OF_OTHER_NAMES else _ops().get(name)


@lru_cache(maxsize=1)
def _ops() -> dict[str, bool]:
    """Every name that a shim may have for an op -> whether one of the op's results is a view."""
    import torch

    import penstock.ops  # noqa: F401  registers ours

    found: dict[str, bool] = {}
    for schema in torch._C._jit_get_all_schemas():
        space, _, stem = schema.name.partition("::")
        views = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
        for name in (stem, f"{space}_{stem}"):
            for full in (name, f"{name}_{schema.overload_name}"):
                found[full] = found.get(full, False) or views
    return found
