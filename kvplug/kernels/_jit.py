"""How a kernel is compiled. The only file that imports numba.

In:  a plain function and its signature.   Out: the compiled function, cached on disk if possible.

    @kernel(i8(reads(u8), u8, writes(u8)))
    def find(slots, key, out_values): ...

`reads(t)` is a C-contiguous array that may be read-only (np.frombuffer makes such), `writes(t)` is
one that the kernel may change. A wrong dtype is refused with a TypeError; scalars convert silently,
so callers check them. With NUMBA_DISABLE_JIT=1 every kernel is the plain Python function.
"""

import gc
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

__all__ = [
    "COMPILED",
    "b1",
    "compile_all",
    "exchange_if",
    "f8",
    "f64_of",
    "fence",
    "fold_multiply",
    "i4",
    "i8",
    "i32_of",
    "i64_of",
    "inlined",
    "inlined_allocating",
    "inlined_optimized",
    "kernel",
    "load_acquire",
    "load_now",
    "load_u64",
    "prefetch",
    "reads",
    "store_release",
    "trailing_zeros",
    "u1",
    "u1_of",
    "u4",
    "u8",
    "u32_of",
    "u64_of",
    "void",
    "writes",
]  # fmt: skip

COMPILED = not numba.config.DISABLE_JIT
"""Whether kernels are machine code, and not plain Python."""

P = ParamSpec("P")
R = TypeVar("R")

b1, u1, i4, u4, i8, u8 = (
    types.boolean,
    types.uint8,
    types.int32,
    types.uint32,
    types.int64,
    types.uint64,
)
f8, void = types.float64, types.void


def reads(dtype: Any) -> Any:
    """Signature of an input array: 1-D, contiguous, read-only or not."""
    return types.Array(dtype, 1, "C", readonly=True)


def writes(dtype: Any) -> Any:
    """Signature of an array that the kernel changes."""
    return types.Array(dtype, 1, "C")


def kernel(
    signature: Any, *, releases_gil: bool = False, allocates: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile for exactly this signature, when first called or by `compile_all`.

    Only one that `allocates` may make arrays: the others do not count references to arrays, which
    is half of the time of a kernel that hands many of them to its parts.

    The GIL is kept unless `releases_gil`: a kernel of microseconds would lose more to the thread
    that takes it meanwhile than it could win. Without a writable cache directory (a read-only
    container, no home) Numba raises: then the kernel is compiled in memory, which costs seconds at
    start and nothing later.
    """

    def prepare(function: Callable[P, R]) -> Callable[P, R]:
        if numba.config.DISABLE_JIT:
            return np.errstate(over="ignore")(function)  # u64 wraps on purpose
        options = {"nogil": releases_gil, "_nrt": allocates}
        try:
            dispatcher = numba.njit(cache=True, **options)(function)
            # Numba asks the age of one file whether cached code is still good; kernels are made of
            # parts of several.
            dispatcher._cache._cache_file._source_stamp = _stamp_for(function.__code__.co_filename)
        except RuntimeError:
            dispatcher = numba.njit(**options)(function)
        _compile_late(dispatcher, signature)
        return cast("Callable[P, R]", dispatcher)

    return prepare


_WAITING: dict[Any, Any] = {}
_COMPILING = threading.Lock()


def _compile_late(dispatcher: Any, signature: Any) -> None:
    def compile_for(*_: Any, **__: Any) -> Any:
        _compile(dispatcher)
        return dispatcher  # which is called with the arguments then

    _WAITING[dispatcher] = signature
    dispatcher._compile_for_args = compile_for  # what Numba asks if no compiled code fits


def _compile(dispatcher: Any) -> None:
    with _COMPILING:
        signature = _WAITING.get(dispatcher)
        if signature is None:
            return
        with _no_garbage_collection():
            try:
                dispatcher.compile(signature)
            except OSError:  # the cache directory is there, but full or read-only
                dispatcher._cache = NullCache()
                dispatcher.compile(signature)
        dispatcher.disable_compile()
        del dispatcher._compile_for_args
        del _WAITING[dispatcher]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Numba makes millions of objects that live as long as the process: to look for garbage among
    them again and again is a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compile_all() -> list[str | None]:
    """Compile every kernel that is imported, so that no first call waits for it.

    Returns the folder of each that was waiting, None for one that no cache keeps.
    """
    waiting = list(_WAITING)
    for dispatcher in waiting:
        _compile(dispatcher)
    return [dispatcher._cache.cache_path for dispatcher in waiting]


@cache
def _stamp_for(filename: str) -> str:
    """Of all kernel files, and of the one at hand, which may be a test's."""
    sources = {*Path(__file__).parent.glob("*.py"), Path(filename)}
    return sha256(b"".join(source.read_bytes() for source in sorted(sources))).hexdigest()


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels, compiled into each that calls it. Python does not call it."""
    return _part(function, _nrt=False, forceinline=True)


def inlined_allocating(function: Callable[P, R]) -> Callable[P, R]:
    """As `inlined`, for a part that makes arrays; it gives none back to one that does not."""
    return _part(function, _nrt=True)


def inlined_optimized(function: Callable[P, R]) -> Callable[P, R]:
    """As `inlined`, for a part that is optimised by itself too, before it is part of a kernel. It
    takes longer to compile: only where the kernel is measurably quicker.
    """
    return _part(function, _PartOptimizer, _nrt=False, forceinline=True)


def _part(function: Callable[P, R], compiler: Any = None, **options: bool) -> Callable[P, R]:
    """Not to make parts callable from Python and C, and to optimise them only in the kernels that
    they become part of, saves half of the time that kernels take to compile.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **options}
    part = numba.njit(pipeline_class=compiler or _PartCompiler, **options)(function)
    if not numba.config.DISABLE_JIT:
        # Else Numba would run what is not there.
        part._insert = lambda *_: None
        part._compile_for_args = partial(_reject_call, function.__name__)
    return cast("Callable[P, R]", part)


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc,unused-ignore]
    """The code of a part and of its own parts, neither optimised nor turned into machine code:
    both is done once, with the kernel that all of it becomes part of.
    """

    def _optimize_final_module(self) -> None:
        """Left to the kernel."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _OptimizedLibrary(_PartLibrary):
    """Optimised, and not turned into machine code."""

    def _optimize_final_module(self) -> None:
        JITCodeLibrary._optimize_final_module(self)


class _PartCompiler(Compiler):  # type: ignore[misc,unused-ignore]
    """Compiles a part to a library that is linked, not called."""

    library = _PartLibrary

    def compile_extra(self, function: Any) -> Any:
        state = self.state
        state.flags.no_compile = True  # no machine code, so no address to ask for
        state.library = self.library(state.targetctx.codegen(), function.__qualname__)
        result = super().compile_extra(function)
        # Callers find a part by its address. Any object will do: the name is what is linked.
        address = object()
        state.targetctx.insert_user_function(address, result.fndesc, [result.library])
        return result._replace(entry_point=address)


class _PartOptimizer(_PartCompiler):
    library = _OptimizedLibrary


def _reject_call(name: str, *_: Any, **__: Any) -> None:
    raise TypeError(f"{name} is a part of kernels, which only they can call")


def _fold_multiply_reference(a: Any, b: Any) -> Any:
    product = int(a) * int(b)
    return np.uint64((product ^ (product >> 64)) & 0xFFFF_FFFF_FFFF_FFFF)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _fold_multiply(typing_context: Any, a: Any, b: Any) -> Any:
    """Low half xor high half of the 128-bit product: one machine multiplication.

    No processor has it for vectors. LLVM makes vectors of a loop around it all the same, and takes
    them apart for each multiplication; an empty statement of assembler keeps the loop as it is.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "", [], True)
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        high = builder.lshr(product, ir.Constant(wide, 64))
        return builder.trunc(builder.xor(product, high), ir.IntType(64))

    return u8(u8, u8), generate


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _prefetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of array[at] (LLVM language reference, llvm.prefetch)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        bit = ir.IntType(32)
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [address.type],
            ir.FunctionType(ir.VoidType(), [address.type, bit, bit, bit]),
        )
        # For writing, to be kept near, data and not code.
        builder.call(hint, [address, bit(1), bit(3), bit(1)])
        return context.get_dummy_value()

    return void(array, u8), generate


def _trailing_zeros_reference(word: Any) -> Any:
    return np.uint64((int(word) & -int(word)).bit_length() - 1)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _trailing_zeros(typing_context: Any, word: Any) -> Any:
    """The number of the lowest set bit of a word that is not 0: one machine instruction."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return u8(u8), generate


def _load_u64_reference(data: Any, at: Any) -> Any:
    return np.uint64(int.from_bytes(data[int(at) : int(at) + 8].tobytes(), "little"))


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _load_u64(typing_context: Any, data: Any, at: Any) -> Any:
    """Eight bytes from `at` on as one little-endian number; no bounds are checked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_ = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(bytes_, [args[1]]), ir.IntType(64).as_pointer())
        return builder.load(address, align=1)

    return u8(data, u8), generate


def _load_now_reference(words: Any) -> Any:
    return words[0]


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _load_now(typing_context: Any, words: Any) -> Any:
    """words[0] as it is in memory, after a short pause: to wait for another thread in a loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):  # PAUSE: the core's other thread goes on
            pause = builder.module.declare_intrinsic(
                "llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])
            )
            builder.call(pause, [])
        address = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(address, "acquire", 8)

    return u8(words), generate


def _load_acquire_reference(words: Any, at: Any) -> Any:
    return words[at]


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _load_acquire(typing_context: Any, words: Any, at: Any) -> Any:
    """words[at] as it is in memory; what is read after it is at least as new."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return u8(words, i8), generate


def _store_release_reference(words: Any, at: Any, value: Any) -> None:
    words[at] = value


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _store_release(typing_context: Any, words: Any, at: Any, value: Any) -> Any:
    """words[at] = value, once all that was written before can be seen."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.store_atomic(args[2], builder.gep(data, [args[1]]), "release", 8)
        return context.get_dummy_value()

    return void(words, i8, u8), generate


def _fence_reference() -> None:
    pass


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _fence(typing_context: Any) -> Any:
    """No read and no write moves from one side of it to the other."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return void(), generate


def _exchange_if_reference(words: Any, expected: Any, wanted: Any) -> bool:
    if words[0] != expected:
        return False
    words[0] = wanted
    return True


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _exchange_if(typing_context: Any, words: Any, expected: Any, wanted: Any) -> Any:
    """Set words[0] if it is as expected, in one step for all threads; whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = context.make_array(signature.args[0])(context, builder, args[0]).data
        done = builder.cmpxchg(address, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(done, 1)

    return b1(words, u8, u8), generate


def _array_of(dtype: Any, kind: str) -> Callable[[Any, Any], Any]:
    """A function (bundle, number) -> the array that a bundle (kernels/bundle.py) has there.

    Nothing keeps the memory of the array alive, and as an intrinsic it may be given back by parts
    that do not count references.
    """
    as_array = types.Array(dtype, 1, "C")

    @intrinsic  # type: ignore[untyped-decorator,unused-ignore]
    def of(typing_context: Any, bundle: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = context.make_array(signature.args[0])(context, builder, args[0]).data
            at = builder.mul(args[1], ir.Constant(ir.IntType(64), 2))
            address = builder.load(builder.gep(words, [at]))
            length = builder.load(builder.gep(words, [builder.add(at, ir.Constant(at.type, 1))]))
            array = context.make_array(as_array)(context, builder)
            size = context.get_abi_sizeof(context.get_data_type(dtype))
            step = context.get_constant(types.intp, size)
            data = builder.inttoptr(address, array.data.type)
            populate_array(array, data, [length], [step], step, None)
            return array._getvalue()

        return as_array(bundle, i8), generate

    def reference(bundle: Any, number: Any) -> Any:
        address, length = int(bundle[2 * number]), int(bundle[2 * number + 1])
        memory = (c_char * (length * np.dtype(kind).itemsize)).from_address(address)
        return np.frombuffer(cast("Any", memory), dtype=kind)

    return cast("Callable[[Any, Any], Any]", reference if numba.config.DISABLE_JIT else of)


u64_of, i64_of = _array_of(types.uint64, "u8"), _array_of(types.int64, "i8")
u32_of, f64_of = _array_of(types.uint32, "u4"), _array_of(types.float64, "f8")
u1_of, i32_of = _array_of(types.uint8, "u1"), _array_of(types.int32, "i4")


def _prefetch_reference(array: Any, at: Any) -> None:
    """Nothing to compute."""


prefetch: Callable[[Any, Any], None] = (
    _prefetch_reference if numba.config.DISABLE_JIT else _prefetch
)
trailing_zeros: Callable[[Any], Any] = (
    _trailing_zeros_reference if numba.config.DISABLE_JIT else _trailing_zeros
)
load_now: Callable[[Any], Any] = _load_now_reference if numba.config.DISABLE_JIT else _load_now
exchange_if: Callable[[Any, Any, Any], Any] = (
    _exchange_if_reference if numba.config.DISABLE_JIT else _exchange_if
)
load_acquire: Callable[[Any, Any], Any] = (
    _load_acquire_reference if numba.config.DISABLE_JIT else _load_acquire
)
store_release: Callable[[Any, Any, Any], None] = (
    _store_release_reference if numba.config.DISABLE_JIT else _store_release
)
fence: Callable[[], None] = _fence_reference if numba.config.DISABLE_JIT else _fence
load_u64: Callable[[Any, Any], Any] = _load_u64_reference if numba.config.DISABLE_JIT else _load_u64

# Numba has no 128-bit integers, and intrinsics do not exist without JIT.
fold_multiply: Callable[[Any, Any], Any] = (
    _fold_multiply_reference if numba.config.DISABLE_JIT else _fold_multiply
)
