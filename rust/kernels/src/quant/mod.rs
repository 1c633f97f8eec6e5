//! Formats in which weights are stored. One file a format, one line in `format_registry`.
//!
//! There are three kinds, and the matmuls are generic over format and instruction set. Of a floating-point format
//! ([`FloatFormat`]) each weight is a number of its own: the format says how sixteen weights of one k become sixteen
//! f32 in a register. An integer format ([`IntegerFormat`]) is our own quantization and says how its codes become lines
//! of bytes; a grouped format ([`GroupedFormat`]) says it of what other programs quantized.
//!
//! All are laid out in panels of sixteen output rows: `[K][16]` (N16K1) for floating-point numbers, so that a register
//! of weights meets one activation, and as [`integer`] and [`grouped`] say for the others.

mod bf16;
mod f16;
mod f32;
mod gptq;
pub mod grouped;
mod int4;
mod int6;
mod int8;
pub mod integer;
mod iq4_nl;
mod mxfp4;
mod q4_0;
mod q4_k;
mod q6_k;
mod q8_0;
mod quantize;
pub(crate) mod rotation;
mod u4;
mod u8;

pub use self::{bf16::Bf16, f16::F16, f32::F32, int4::Int4, int6::Int6, int8::Int8, integer::IntegerFormat};
pub use self::{grouped::GroupedFormat, grouped::StoredBlock};
pub use self::{iq4_nl::Iq4Nl, mxfp4::Mxfp4, q4_0::Q4_0, q4_k::Q4K, q6_k::Q6K, q8_0::Q8_0, u4::U4, u8::U8};
pub(crate) use gptq::{CalibratedPanel, PackCalibrated};
pub(crate) use quantize::pack_panel;

use bytemuck::Pod;

use crate::arch::{LANES, LINE, Simd};

/// Weights of sixteen output rows at one k.
pub type Line<F> = [<F as FloatFormat>::Element; LANES];

/// A format in which each weight is a floating-point number of its own.
pub trait FloatFormat: Send + Sync + 'static {
    /// A stored weight.
    type Element: Pod + Send + Sync;

    /// Sixteen weights as f32, exactly.
    fn widen<S: Simd>(simd: S, line: &Line<Self>) -> S::F32;

    /// One weight as f32, exactly.
    fn widen_one(element: Self::Element) -> f32;

    /// The nearest weights, ties to even.
    fn narrow(values: &[f32; LANES]) -> Line<Self>;
}

/// What runs with a format known at compile time; see [`Format::visit`].
pub trait FormatVisitor: Sized {
    /// What the visitor returns.
    type Output;

    /// Runs for a floating-point format.
    fn float<F: FloatFormat>(self) -> Self::Output;

    /// Runs for an integer format.
    fn integer<F: IntegerFormat>(self) -> Self::Output;

    /// Runs for a grouped format.
    fn grouped<F: GroupedFormat>(self) -> Self::Output;
}

/// Writes [`Format`] and its dispatch from one list, widest first.
macro_rules! format_registry {
    ($($name:literal => $kind:ident $format:ident),* $(,)?) => {
        /// A format in which weights are stored.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Format {
            $(#[doc = concat!("`", $name, "`")] $format),*
        }

        impl Format {
            /// Every format, widest first.
            pub const ALL: &'static [Self] = &[$(Self::$format),*];

            /// Its name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$format => $name),* }
            }

            /// The one of that name.
            #[must_use]
            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|format| format.name() == name)
            }

            /// Runs `visitor` with this format as a type.
            pub fn visit<V: FormatVisitor>(self, visitor: V) -> V::Output {
                match self { $(Self::$format => visitor.$kind::<$format>()),* }
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
    "u4" => grouped U4,
    "q4_0" => grouped Q4_0,
    "q4_k" => grouped Q4K,
    "iq4_nl" => grouped Iq4Nl,
    "int4" => integer Int4,
    "mxfp4" => grouped Mxfp4,
}

impl Format {
    /// Whether weights are codes that are multiplied as bytes.
    #[must_use]
    pub fn is_integer(self) -> bool {
        struct IsInteger;

        impl FormatVisitor for IsInteger {
            type Output = bool;

            fn float<F: FloatFormat>(self) -> bool {
                false
            }

            fn integer<F: IntegerFormat>(self) -> bool {
                true
            }

            fn grouped<F: GroupedFormat>(self) -> bool {
                true
            }
        }

        self.visit(IsInteger)
    }

    /// The blocks that rows of a grouped format are stored in, and are packed from; `None` of other formats, which are
    /// packed from numbers.
    #[must_use]
    pub fn stored_block(self) -> Option<StoredBlock> {
        struct Stored;

        impl FormatVisitor for Stored {
            type Output = Option<StoredBlock>;

            fn float<F: FloatFormat>(self) -> Self::Output {
                None
            }

            fn integer<F: IntegerFormat>(self) -> Self::Output {
                None
            }

            fn grouped<F: GroupedFormat>(self) -> Self::Output {
                Some(F::STORED)
            }
        }

        self.visit(Stored)
    }

    /// Bytes of a panel, sixteen output rows of `cols` weights, without its steps. None where they cannot be counted.
    #[must_use]
    pub(crate) fn panel_bytes(self, cols: usize) -> Option<usize> {
        struct PanelBytes(usize);

        impl FormatVisitor for PanelBytes {
            type Output = Option<usize>;

            fn float<F: FloatFormat>(self) -> Option<usize> {
                self.0.checked_mul(size_of::<Line<F>>())
            }

            fn integer<F: IntegerFormat>(self) -> Option<usize> {
                // No format takes more than two lines for four inputs: the count itself cannot overflow.
                (self.0 < usize::MAX / LINE).then(|| F::lines(integer::blocks(self.0)))?.checked_mul(LINE)
            }

            fn grouped<F: GroupedFormat>(self) -> Option<usize> {
                // Nor more than two bytes for a weight.
                (self.0 < usize::MAX / LINE).then(|| F::lines(self.0.div_ceil(grouped::GROUP)))?.checked_mul(LINE)
            }
        }

        self.visit(PanelBytes(cols))
    }

    /// Steps that a panel over `cols` inputs has for each of its rows.
    pub(crate) fn panel_steps(self, cols: usize) -> usize {
        if self.is_integer() && self.stored_block().is_none() { integer::supers(cols) } else { 0 }
    }
}

/// Lines of floating-point weights never straddle cache lines and have no padding.
const _: () = {
    assert!(size_of::<Line<F32>>() == 64 && size_of::<Line<Bf16>>() == 32 && size_of::<Line<F16>>() == 32);
};
