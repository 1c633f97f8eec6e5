//! Formats in which weights are stored. One file a format, one line in `format_registry`.
//!
//! The matmul is generic over format and instruction set: a format says how sixteen weights of one k become sixteen
//! f32 in a register. Panels of sixteen output rows are laid out as `[K][16]` (N16K1), so that a register of weights
//! meets one activation.

mod bf16;
mod f16;
mod f32;

pub use self::{bf16::Bf16, f16::F16, f32::F32};

use bytemuck::Pod;

use crate::arch::{LANES, Simd};

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
pub trait FormatVisitor {
    /// What the visitor returns.
    type Output;

    /// Runs for format `F`.
    fn visit<F: FloatFormat>(self) -> Self::Output;
}

/// Writes [`Format`] and its dispatch from one list, widest first.
macro_rules! format_registry {
    ($($name:literal => $format:ident, $bits:literal bits),* $(,)?) => {
        /// A format in which weights are stored.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Format {
            $(#[doc = concat!("`", $name, "`")] $format),*
        }

        impl Format {
            /// Every format, widest first.
            pub const ALL: &'static [Self] = &[$(Self::$format),*];

            /// The name that users write.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$format => $name),* }
            }

            /// Bytes of a line: sixteen output rows at one k.
            #[must_use]
            pub const fn line_bytes(self) -> usize {
                match self { $(Self::$format => size_of::<Line<$format>>()),* }
            }

            /// Runs `visitor` with this format as a type.
            pub fn visit<V: FormatVisitor>(self, visitor: V) -> V::Output {
                match self { $(Self::$format => visitor.visit::<$format>()),* }
            }
        }

        $(const _: () = {
            assert!(size_of::<Line<$format>>() * 8 == LANES * $bits, "a line is sixteen weights and no padding");
            assert!(64 % size_of::<Line<$format>>() == 0, "lines never straddle cache lines");
        };)*
    };
}

format_registry! {
    "f32" => F32, 32 bits,
    "bf16" => Bf16, 16 bits,
    "f16" => F16, 16 bits,
}

impl Format {
    /// The format that users call `name`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.name() == name)
    }
}
