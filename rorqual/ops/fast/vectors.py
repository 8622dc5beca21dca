"""Sixteen-wide vectors for Numba kernels, as LLVM vector values that live in registers.

A kernel written with these reads like its formula and compiles to full-width code: LLVM maps a 16-wide fp32 vector to
one AVX512 register, two of AVX2, four of NEON. Numba's own loops leave that to the auto-vectoriser, which may not
reorder a floating sum.

Arithmetic is IEEE fp32 in the order written (no fast-math). No bounds are checked; offsets count elements.

`instruction` makes a function that emits LLVM code into one that kernels call; `tiles` and `decode` build on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16

# Numba's own modules are typed too loosely for typed code.
_cgutils: Any = cgutils
tuple_of: Any = types.UniTuple
"""(element type, count) -> Numba type of a tuple."""

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
VECTOR_F32 = ir.VectorType(ir.FloatType(), LANES)
VECTOR_I32 = ir.VectorType(I32, LANES)
VECTOR_I8 = ir.VectorType(I8, LANES)


class Vector(types.Type):
    """Numba type of a vector value; it never leaves compiled code."""

    def __init__(self, element: str, llvm_type: ir.VectorType) -> None:
        super().__init__(f"vector({element} x {LANES})")
        self.llvm_type = llvm_type


F32, S32 = Vector("float32", VECTOR_F32), Vector("int32", VECTOR_I32)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm_type)  # type: ignore[no-untyped-call]


ARRAY = "array"
"""Stands for any one-dimensional contiguous array among an instruction's arguments; `emit` gets its data pointer."""


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `emit(builder, *values)`, which emits LLVM code, becomes callable in kernels.

    Args:
        result: Numba type of the result; `types.void` for none.
        arguments: Numba type of each argument, or `ARRAY`.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def rule(typing: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                values = [
                    context.make_array(kind)(context, builder, value).data if wanted is ARRAY else value
                    for wanted, kind, value in zip(arguments, signature.args, args, strict=True)
                ]
                value = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else value

            kinds = [have if wanted is ARRAY else wanted for wanted, have in zip(arguments, given, strict=True)]
            return result(*kinds), generate

        rule.__name__, rule.__doc__ = emit.__name__, emit.__doc__
        # Numba lowers a call by the parameters of the function it is handed; `builder` stands for its typing context.
        rule.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(rule)

    return decorate


def const(kind: Any, value: float) -> ir.Constant:
    """A constant of a scalar type, or of a vector type in every lane."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def pick(lanes: list[int]) -> ir.Constant:
    """The lane numbers of a shuffle."""
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)


def broadcast(builder: Any, scalar: Any, kind: ir.VectorType) -> Any:
    """A scalar in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, scalar, const(I32, 0)), undefined, pick([0] * kind.count)
    )


def load_at(builder: Any, data: Any, offset: Any, kind: Any) -> Any:
    """A value of LLVM type `kind`, from `offset` elements past the pointer `data`; any alignment."""
    pointer = builder.bitcast(builder.gep(data, [offset]), kind.as_pointer())
    return builder.load(pointer, align=1 if data.type.pointee == I8 else 4)


def store_at(builder: Any, value: Any, data: Any, offset: Any) -> None:
    """Inverse of `load_at`."""
    pointer = builder.bitcast(builder.gep(data, [offset]), value.type.as_pointer())
    builder.store(value, pointer, align=1 if data.type.pointee == I8 else 4)


def ahead(builder: Any, offset: Any, stride: Any, count: int) -> Any:
    """offset + count * stride, with `stride` a number or an LLVM value."""
    if isinstance(stride, int):
        return builder.add(offset, const(I64, stride * count))
    return builder.add(offset, builder.mul(stride, const(I64, count)))


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic by name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(_cgutils.get_or_insert_function(builder.module, kind, name), args)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", VECTOR_F32, a, b, c)


def emit_relu(builder: Any, x: Any) -> Any:
    """max(x, 0) that keeps NaN: a poisoned score must stay visible."""
    zero = const(VECTOR_F32, 0.0)
    return builder.select(builder.fcmp_ordered("<", x, zero), zero, x)


def emit_round_bf16(builder: Any, x: Any) -> Any:
    """To the nearest bf16, ties to even; x is a vector or a float. NaNs of arithmetic and scale tables stay NaN."""
    integer = VECTOR_I32 if isinstance(x.type, ir.VectorType) else I32
    bits = builder.bitcast(x, integer)
    odd = builder.and_(builder.lshr(bits, const(integer, 16)), const(integer, 1))
    bits = builder.add(builder.add(bits, const(integer, 0x7FFF)), odd)
    return builder.bitcast(builder.and_(bits, const(integer, 0xFFFF0000)), x.type)


@instruction(F32, ARRAY, types.intp)
def load(builder: Any, data: Any, offset: Any) -> Any:
    """Sixteen elements of a float32 array."""
    return load_at(builder, data, offset, VECTOR_F32)


@instruction(types.void, ARRAY, types.intp, F32)
def store(builder: Any, data: Any, offset: Any, vector: Any) -> None:
    """Write sixteen elements of a float32 array."""
    store_at(builder, vector, data, offset)


@instruction(types.void, ARRAY, types.intp)
def prefetch(builder: Any, data: Any, offset: Any) -> None:
    """Ask for the cache line of an element, which is read soon; any offset is allowed."""
    kind = ir.FunctionType(ir.VoidType(), [data.type, I32, I32, I32])
    ask = builder.module.declare_intrinsic("llvm.prefetch", (data.type,), kind)
    builder.call(ask, [builder.gep(data, [offset]), I32(0), I32(3), I32(1)])


@instruction(F32, types.float32)
def splat(builder: Any, scalar: Any) -> Any:
    """A float32 in every lane."""
    return broadcast(builder, scalar, VECTOR_F32)


@instruction(F32, F32, F32)
def add(builder: Any, x: Any, y: Any) -> Any:
    """x + y"""
    return builder.fadd(x, y)


@instruction(F32, F32, F32)
def subtract(builder: Any, x: Any, y: Any) -> Any:
    """x - y"""
    return builder.fsub(x, y)


@instruction(F32, F32, F32)
def multiply(builder: Any, x: Any, y: Any) -> Any:
    """x * y"""
    return builder.fmul(x, y)


@instruction(F32, F32, F32)
def divide(builder: Any, x: Any, y: Any) -> Any:
    """x / y"""
    return builder.fdiv(x, y)


@instruction(F32, F32, F32)
def maximum(builder: Any, x: Any, y: Any) -> Any:
    """x where x > y or y is NaN, else y; a NaN x gives y."""
    return builder.select(builder.fcmp_unordered(">", x, y), x, y)


@instruction(F32, F32, F32)
def minimum(builder: Any, x: Any, y: Any) -> Any:
    """x where x < y or either is NaN, else y."""
    return builder.select(builder.fcmp_unordered("<", x, y), x, y)


@instruction(F32, F32)
def round_bf16(builder: Any, x: Any) -> Any:
    """To the nearest bf16, ties to even."""
    return emit_round_bf16(builder, x)


@instruction(types.float32, types.float32)
def round_bf16_scalar(builder: Any, x: Any) -> Any:
    """To the nearest bf16, ties to even."""
    return emit_round_bf16(builder, x)


@instruction(F32, F32)
def exp(builder: Any, x: Any) -> Any:
    """e^x to about 1 ulp: 2^n * polynomial(r), x = n ln 2 + r. 0 below -87.3, infinity above 88.7, NaN stays NaN."""
    low, high = const(VECTOR_F32, -87.33654), const(VECTOR_F32, 88.72283)
    inside = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    inside = builder.select(builder.fcmp_ordered(">", x, high), high, inside)
    n = call(builder, "llvm.nearbyint.v16f32", VECTOR_F32, builder.fmul(inside, const(VECTOR_F32, 1.4426950408889634)))
    # ln 2 in two parts; n times the first is exact.
    r = emit_fma(builder, n, const(VECTOR_F32, -0.693359375), inside)
    r = emit_fma(builder, n, const(VECTOR_F32, 2.12194440e-4), r)
    y = const(VECTOR_F32, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = emit_fma(builder, y, r, const(VECTOR_F32, coefficient))
    y = builder.fadd(emit_fma(builder, y, builder.fmul(r, r), r), const(VECTOR_F32, 1.0))
    # 2^n as two factors, because 2^128 is no fp32 number.
    whole = builder.fptosi(n, VECTOR_I32)
    half = builder.ashr(whole, const(VECTOR_I32, 1))
    for part in (half, builder.sub(whole, half)):
        power = builder.shl(builder.add(part, const(VECTOR_I32, 127)), const(VECTOR_I32, 23))
        y = builder.fmul(y, builder.bitcast(power, VECTOR_F32))
    y = builder.select(builder.fcmp_ordered("<", x, low), const(VECTOR_F32, 0.0), y)
    y = builder.select(builder.fcmp_ordered(">", x, high), const(VECTOR_F32, float("inf")), y)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, y)
