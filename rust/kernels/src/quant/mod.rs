//! Formats in which weights are stored. One file a format, one line in `format_registry`.
//!
//! There are two kinds, and the matmuls are generic over format and instruction set. Of a floating-point format
//! ([`FloatFormat`]) each weight is a number of its own: the format says how sixteen weights of one k become sixteen
//! f32 in a register. An integer format ([`IntegerFormat`]) says how its codes become lines of bytes.
//!
//! Both are laid out in panels of sixteen output rows: `[K][16]` (N16K1) for floating-point numbers, so that a register
//! of weights meets one activation, and as [`integer`] says for the others.

mod bf16;
mod f16;
mod f32;
mod gptq;
mod int4;
mod int6;
mod int8;
pub mod integer;
mod quantize;
pub(crate) mod rotation;

pub use self::{bf16::Bf16, f16::F16, f32::F32, int4::Int4, int6::Int6, int8::Int8, integer::IntegerFormat};
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
    "int8" => integer Int8,
    "int6" => integer Int6,
    "int4" => integer Int4,
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
        }

        self.visit(IsInteger)
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
        }

        self.visit(PanelBytes(cols))
    }

    /// Steps that a panel over `cols` inputs has for each of its rows.
    pub(crate) fn panel_steps(self, cols: usize) -> usize {
        if self.is_integer() { integer::supers(cols) } else { 0 }
    }
}

/// Lines of floating-point weights never straddle cache lines and have no padding.
const _: () = {
    assert!(size_of::<Line<F32>>() == 64 && size_of::<Line<Bf16>>() == 32 && size_of::<Line<F16>>() == 32);
};
