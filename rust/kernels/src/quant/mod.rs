//! Weight formats. Each format is a file here and a line in `format_registry`.
//!
//! There are three families of formats, and the matmul is generic over format and instruction set. Floating-point
//! formats ([`FloatFormat`]) store each weight separately and define how sixteen weights are converted to a register of
//! f32. Integer formats ([`IntegerFormat`]) are ferrule's own quantization; grouped formats ([`GroupedFormat`]) are
//! those of other programs, such as ggml and GPTQ. Both define how codes are unpacked to lines of bytes. Most formats of
//! ggml are descriptions of their stored blocks, from which the layout and the arithmetic follow. Sparse formats
//! are grouped formats whose panels store nonzero codes alone.
//!
//! All formats are stored in panels of sixteen output rows: `[K][16]` (N16K1) for floating-point formats, so that a
//! register of weights is multiplied with one activation, and as described in [`integer`] and [`grouped`] for the others.

mod bf16;
mod blocks;
mod descent;
mod f16;
mod f32;
pub(crate) mod family;
mod gptq;
pub mod grids;
pub mod grouped;
mod int2;
mod int3;
mod int4;
mod int5;
mod int6;
mod int8;
mod int8_sparse;
pub mod integer;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
mod iq4_nl;
mod iq4_xs;
mod levels;
mod mxfp4;
mod planes;
pub mod points;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod quantize;
pub(crate) mod rotation;
pub(crate) mod sparse;
pub(crate) mod trellis;
mod trellis2;
mod trellis3;
mod trellis4;
mod trellis5;
mod trellis_descent;
mod trellis_gptq;
mod two_bit_scales;
mod two_of_four;
mod u4;
mod u8;
mod viterbi;

pub use self::{
    bf16::Bf16, f16::F16, f32::F32, int2::Int2, int3::Int3, int4::Int4, int5::Int5, int6::Int6, int8::Int8,
    integer::IntegerFormat,
};
pub use self::{grouped::GroupedFormat, grouped::StoredBlock};
pub use self::{int8_sparse::Int8Sparse, two_of_four::Int4TwoOfFour, two_of_four::Int8TwoOfFour};
pub use self::{iq2_s::Iq2S, iq2_xs::Iq2Xs, iq2_xxs::Iq2Xxs, iq3_s::Iq3S, iq3_xxs::Iq3Xxs, points::PointFormat};
pub use self::{iq2_s::Iq2SBlock, iq2_xs::Iq2XsBlock, iq2_xxs::Iq2XxsBlock, iq3_s::Iq3SBlock, iq3_xxs::Iq3XxsBlock};
pub use self::{iq4_nl::Iq4Nl, iq4_xs::Iq4Xs, mxfp4::Mxfp4, q2_k::Q2K, q3_k::Q3K, q4_0::Q4_0, q4_1::Q4_1, q4_k::Q4K};
pub use self::{q5_0::Q5_0, q5_1::Q5_1, q5_k::Q5K, q6_k::Q6K, q8_0::Q8_0, u4::U4, u8::U8};
pub use self::{trellis2::Trellis2, trellis3::Trellis3, trellis4::Trellis4, trellis5::Trellis5};
pub(crate) use descent::ROWS_INPUT_BYTES;
pub(crate) use family::{Family, Quantized};
pub(crate) use gptq::{CalibratedPanel, PANEL_INPUT_BYTES, PackCalibrated};
pub(crate) use quantize::pack_panel;
use sparse::Sparse;
pub use sparse::TooDense;

use std::marker::PhantomData;

use bytemuck::Pod;

use crate::arch::{LANES, Simd};

/// Weights of sixteen output rows at one k.
pub type Line<F> = [<F as FloatFormat>::Element; LANES];

/// Format that stores each weight as a floating-point number.
pub trait FloatFormat: Send + Sync + 'static {
    /// Stored representation of a weight.
    type Element: Pod + Send + Sync;

    /// Converts sixteen weights to f32, exactly.
    fn widen<S: Simd>(simd: S, line: &Line<Self>) -> S::F32;

    /// Converts one weight to f32, exactly.
    fn widen_one(element: Self::Element) -> f32;

    /// Converts sixteen f32, rounding to nearest, ties to even.
    fn narrow(values: &[f32; LANES]) -> Line<Self>;
}

/// Returns the family of a format type.
macro_rules! family {
    (float $format:ident) => {
        Family::Float(&PhantomData::<$format>)
    };
    (integer $format:ident) => {
        Family::Quantized(Quantized::Integer(&PhantomData::<$format>))
    };
    (grouped $format:ident) => {
        Family::Quantized(Quantized::Grouped(&PhantomData::<$format>))
    };
    (sparse $format:ident) => {
        Family::Quantized(Quantized::Grouped(&Sparse(PhantomData::<$format>)))
    };
}

/// Defines [`Format`] and its families from one list, widest format first.
macro_rules! format_registry {
    ($($name:literal => $family:ident $format:ident),* $(,)?) => {
        /// Weight format.
        ///
        /// # Examples
        /// ```
        /// use ferrule_kernels::Format;
        ///
        /// assert_eq!(Format::named("int4"), Some(Format::Int4));
        /// assert!(Format::Q4K.is_integer());
        /// assert_eq!(Format::Q4K.stored_block().unwrap().bytes, 144);
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Format {
            $(#[doc = concat!("`", $name, "`")] $format),*
        }

        impl Format {
            /// All formats, widest first.
            pub const ALL: &'static [Self] = &[$(Self::$format),*];

            /// Returns the name of the format.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$format => $name),* }
            }

            /// Returns the format called `name`, if there is one.
            #[must_use]
            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|format| format.name() == name)
            }

            /// Returns the family of the format, with its operations on panels.
            pub(crate) fn family(self) -> Family {
                match self { $(Self::$format => family!($family $format)),* }
            }
        }
    };
}

format_registry! {
    "f32" => float F32,
    "bf16" => float Bf16,
    "f16" => float F16,
    "u8" => grouped U8,
    "q8_0" => grouped Q8_0,
    "int8" => integer Int8,
    "q6_k" => grouped Q6K,
    "int6" => integer Int6,
    "q5_1" => grouped Q5_1,
    "q5_0" => grouped Q5_0,
    "q5_k" => grouped Q5K,
    "int5" => integer Int5,
    "trellis5" => integer Trellis5,
    "int8_2of4" => sparse Int8TwoOfFour,
    "int8_sparse" => sparse Int8Sparse,
    "q4_1" => grouped Q4_1,
    "u4" => grouped U4,
    "q4_0" => grouped Q4_0,
    "q4_k" => grouped Q4K,
    "iq4_nl" => grouped Iq4Nl,
    "int4" => integer Int4,
    "iq4_xs" => grouped Iq4Xs,
    "mxfp4" => grouped Mxfp4,
    "trellis4" => integer Trellis4,
    "q3_k" => grouped Q3K,
    "iq3_s" => grouped Iq3S,
    "int4_2of4" => sparse Int4TwoOfFour,
    "int3" => integer Int3,
    "trellis3" => integer Trellis3,
    "iq3_xxs" => grouped Iq3Xxs,
    "q2_k" => grouped Q2K,
    "iq2_s" => grouped Iq2S,
    "iq2_xs" => grouped Iq2Xs,
    "int2" => integer Int2,
    "trellis2" => integer Trellis2,
    "iq2_xxs" => grouped Iq2Xxs,
}

impl Format {
    /// Returns whether weights are integer codes, which are multiplied as bytes (integer and grouped formats).
    #[must_use]
    pub fn is_integer(self) -> bool {
        matches!(self.family(), Family::Quantized(_))
    }

    /// Returns the stored block of a grouped format. `None` for other formats, which are packed from numbers.
    #[must_use]
    pub fn stored_block(self) -> Option<StoredBlock> {
        match self.family() {
            Family::Quantized(Quantized::Grouped(format)) => Some(format.stored()),
            Family::Quantized(Quantized::Integer(_)) | Family::Float(_) => None,
        }
    }

    /// Returns whether panels store nonzero codes alone, in a space that dense weights exceed.
    #[must_use]
    pub fn is_sparse(self) -> bool {
        matches!(self.family(), Family::Quantized(Quantized::Grouped(format)) if format.is_sparse())
    }

    /// Returns the bytes of a panel of `cols` inputs, without block scales. `None` if they overflow.
    #[must_use]
    pub(crate) fn panel_bytes(self, cols: usize) -> Option<usize> {
        match self.family() {
            Family::Float(format) => format.bytes(cols),
            Family::Quantized(Quantized::Integer(format)) => format.bytes(cols),
            Family::Quantized(Quantized::Grouped(format)) => format.bytes(cols),
        }
    }

    /// Returns the number of block scales of a row over `cols` inputs; 0 for formats without them.
    pub(crate) fn panel_scales(self, cols: usize) -> usize {
        match self.family() {
            Family::Quantized(Quantized::Integer(_)) => integer::supers(cols),
            Family::Quantized(Quantized::Grouped(_)) | Family::Float(_) => 0,
        }
    }
}

/// Lines of floating-point weights do not straddle cache lines and have no padding.
const _: () = {
    assert!(size_of::<Line<F32>>() == 64 && size_of::<Line<Bf16>>() == 32 && size_of::<Line<F16>>() == 32);
};
