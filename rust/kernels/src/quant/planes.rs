//! Numbers of few bits in bit planes.
//!
//! A number of N bits is split into planes of 8, 4, 2 and 1 bits, those that are ones in the binary digits of N: five bits
//! are four low bits and a high one. Planes of more bits hold lower bits and come first. In a plane of n bits, number i is
//! in byte vector `i / (8 / n)`, from bit `i % (8 / n) * n` on. A vector holds the numbers of several lanes side by side:
//! four codes of each of sixteen rows, or one sub-scale of each.

use bytemuck::Pod;

use crate::arch::{ByteLine, LANES, Plane, Simd};
use crate::quant::integer::PAIR_QUADS;

/// Bits of the planes.
const WIDTHS: [usize; 4] = [8, 4, 2, 1];

/// Numbers of a constant number of bits.
pub trait BitPlanes: 'static {
    /// Number of bits. Eight vectors of numbers take as many vectors of bytes.
    const BITS: usize;

    /// Returns codes `index` of the eight that share [`Self::BITS`] lines.
    fn quad<S: Simd>(simd: S, lines: &[ByteLine], index: usize) -> S::Bytes;

    /// Returns the number of each lane less `zero`, from its index and the number of numbers. Numbers of eight bits are
    /// signed.
    fn lanes<S: Simd>(simd: S, vectors: &[[u8; LANES]], place: (usize, usize), zero: u8) -> S::I32;

    /// Returns the planes of number `index` of `count`: the index of the vector, the lowest bit in its byte, the lowest bit
    /// in the number, and the number of bits.
    fn planes(count: usize, index: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let planes = WIDTHS.into_iter().filter(|width| Self::BITS & width != 0);
        planes.map(move |width| {
            let (lower, each) = (lower_bits(Self::BITS, width), 8 / width);
            (lower * count / 8 + index / each, index % each * width, lower, width)
        })
    }

    /// Stores number `index` of `count` of lane `lane` in zeroed vectors.
    fn store<V: AsMut<[u8]>>(vectors: &mut [V], count: usize, index: usize, lane: usize, number: u8) {
        for (vector, to, from, width) in Self::planes(count, index) {
            vectors[vector].as_mut()[lane] |= (number >> from & mask(width)) << to;
        }
    }

    /// Returns number `index` of `count` of lane `lane`, without a sign.
    fn number<V: AsRef<[u8]>>(vectors: &[V], count: usize, index: usize, lane: usize) -> u8 {
        let planes = Self::planes(count, index);
        let bits = planes.map(|(vector, from, to, width)| (vectors[vector].as_ref()[lane] >> from & mask(width)) << to);
        bits.fold(0, |number, bits| number | bits)
    }
}

/// Returns the number of bits in the planes before that of `width` bits.
const fn lower_bits(bits: usize, width: usize) -> usize {
    bits & !(2 * width - 1)
}

/// Returns a byte whose lowest `width` bits are ones.
const fn mask(width: usize) -> u8 {
    u8::MAX >> (8 - width)
}

/// Views lines as vectors of N bytes.
pub fn vectors<const N: usize>(lines: &[ByteLine]) -> &[[u8; N]]
where
    [u8; N]: Pod,
{
    bytemuck::cast_slice(lines)
}

/// Mutable version of [`vectors`].
pub fn vectors_mut<const N: usize>(lines: &mut [ByteLine]) -> &mut [[u8; N]]
where
    [u8; N]: Pod,
{
    bytemuck::cast_slice_mut(lines)
}

/// Numbers of `N` bits.
pub struct Bits<const N: usize>;

impl<const N: usize> Bits<N> {
    /// Returns the bits of codes `index` in the plane of `WIDTH` bits, in their place in the codes.
    #[inline(always)]
    fn plane<S: Simd, const WIDTH: usize>(simd: S, lines: &[ByteLine], index: usize) -> S::Bytes {
        let (to, each) = (const { lower_bits(N, WIDTH) }, 8 / WIDTH);
        let line = simd.load_bytes(&lines[to * PAIR_QUADS / 8 + index / each].0);
        simd.and(shift(simd, line, index % each * WIDTH, to), simd.splat_byte(mask(WIDTH) << to))
    }

    /// Returns the bits of number `index` in the plane of `width` bits, if there is one.
    #[inline(always)]
    fn lane_plane(vectors: &[[u8; LANES]], count: usize, index: usize, width: usize) -> Option<Plane<'_>> {
        if N & width == 0 {
            return None;
        }
        let (to, each) = (lower_bits(N, width), 8 / width);
        Some(Plane { bytes: &vectors[to * count / 8 + index / each], from: index % each * width, width, to })
    }
}

impl<const N: usize> BitPlanes for Bits<N> {
    const BITS: usize = N;

    #[inline(always)]
    fn quad<S: Simd>(simd: S, lines: &[ByteLine], index: usize) -> S::Bytes {
        let mut codes = simd.splat_byte(0);
        if const { N & 8 != 0 } {
            codes = simd.load_bytes(&lines[index].0);
        }
        if const { N & 4 != 0 } {
            codes = simd.or(codes, Self::plane::<S, 4>(simd, lines, index));
        }
        if const { N & 2 != 0 } {
            codes = simd.or(codes, Self::plane::<S, 2>(simd, lines, index));
        }
        if const { N & 1 != 0 } {
            codes = simd.or(codes, Self::plane::<S, 1>(simd, lines, index));
        }
        codes
    }

    #[inline(always)]
    fn lanes<S: Simd>(simd: S, vectors: &[[u8; LANES]], (index, count): (usize, usize), zero: u8) -> S::I32 {
        if const { N == 8 } {
            return simd.load_i8(bytemuck::cast_ref(&vectors[index]));
        }
        let plane = |width| Self::lane_plane(vectors, count, index, width);
        simd.load_planes([plane(4), plane(2), plane(1)], zero)
    }
}

/// Moves bit `from` of each byte to bit `to`. Bits of neighbouring bytes move into the others.
#[inline(always)]
pub fn shift<S: Simd>(simd: S, bytes: S::Bytes, from: usize, to: usize) -> S::Bytes {
    match to.cast_signed() - from.cast_signed() {
        4 => simd.shift_left::<4>(bytes),
        3 => simd.shift_left::<3>(bytes),
        2 => simd.shift_left::<2>(bytes),
        1 => simd.shift_left::<1>(bytes),
        0 => bytes,
        -1 => simd.shift_right::<1>(bytes),
        -2 => simd.shift_right::<2>(bytes),
        -3 => simd.shift_right::<3>(bytes),
        -4 => simd.shift_right::<4>(bytes),
        -5 => simd.shift_right::<5>(bytes),
        -6 => simd.shift_right::<6>(bytes),
        -7 => simd.shift_right::<7>(bytes),
        bits => unreachable!("no plane moves by {bits} bits"),
    }
}
