"""The formats that the study compares, by name."""

from formats import (
    IQ4_NL,
    SEARCH,
    Format,
    Grid,
    GroupScale,
    SubScales,
    by_magnitude,
    by_square,
    either_sign,
    integers,
    linear,
    q6_k,
    symmetric,
    up_to,
)

Q6_K = Format("Q6_K", 6.5625, q6_k)
Q8_0 = Format("Q8_0", 8.5, GroupScale(32, symmetric(8), signed=False))
Q4_0 = Format("Q4_0", 4.5, GroupScale(32, linear(4)))
IQ4 = Format("IQ4_NL", 4.5, GroupScale(32, Grid(IQ4_NL), SEARCH, by_square))
G32 = Format("g32 f16, search", 4.5, GroupScale(32, linear(4), SEARCH))
G32_SQUARE = Format("g32 f16, search by w^2", 4.5, GroupScale(32, linear(4), SEARCH, by_square))
G32_MAGNITUDE = Format("g32 f16, search by magnitude", 4.5, GroupScale(32, linear(4), SEARCH, by_magnitude))
G64 = Format("g64 f16, search", 4.25, GroupScale(64, linear(4), SEARCH))
G128 = Format("g128 f16, search", 4.125, GroupScale(128, linear(4), SEARCH))
S16 = Format("s16: sub-scales 0..15", 4.3125, SubScales(16, linear(4), up_to(15)))
S32 = Format("s32: sub-scales 0..15", 4.1875, SubScales(32, linear(4), up_to(15)))
S64 = Format("s64: sub-scales 0..15", 4.125, SubScales(64, linear(4), up_to(15)))
S16_SIGNED = Format("s16, -7..7", 4.3125, SubScales(16, linear(4), either_sign(*range(1, 8))))
S16_FINE = Format("s16, -15..15", 4.375, SubScales(16, linear(4), either_sign(*range(1, 16))))
SMALL_LEVELS = integers(-12, -10, -8, -6, -5, -4, -2, -1, 0, 1, 2, 3, 5, 6, 8, 10)
S16_BOOK = Format("s16, 16 small levels, +-3..10", 4.3125, SubScales(16, SMALL_LEVELS, either_sign(*range(3, 11))))
S16_IQ = Format("s16, IQ4_NL levels, +-1..7", 4.3125, SubScales(16, Grid(IQ4_NL), either_sign(*range(1, 8))))
ROW32 = Format("g32 u8 scale, f32 a row", 4.25, SubScales(32, linear(4), up_to(255), super_block=1 << 30))
INT6 = Format("int6: s16, 1..4", 6.1875, SubScales(16, linear(6), integers(1, 2, 3, 4)))
INT8 = Format("int8: f16 step of 256", 8.0625, GroupScale(256, symmetric(8), signed=False))
INT8_128 = Format("int8 g128", 8.125, GroupScale(128, symmetric(8), signed=False))
INT8_64 = Format("int8 g64", 8.25, GroupScale(64, symmetric(8), signed=False))
INT8_ROW = Format(
    "int8 per row", 8 + 32 * 19_456 / 5_767_168, GroupScale(1 << 30, symmetric(8), signed=False, scale_in_f32=True)
)
