//! Element types of tensors.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Declares each type once: variant, name in the file, bits per element.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// Type of a stored element, named as in safetensors files.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Dtype { $($(#[$doc])* $variant,)* }

        impl Dtype {
            /// All types.
            pub const ALL: &[Dtype] = &[$(Dtype::$variant),*];

            /// Names of all types, each after a space. This is a constant because LLVM takes minutes to unroll a loop
            /// that joins them.
            pub const NAMES: &str = concat!($(" ", $name),*);

            /// Returns the type that files call `name`.
            pub fn named(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }

            /// Returns the name in files.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the number of bits per element.
            pub fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }
        }
    };
}

dtypes! {
    /// IEEE 754 single precision.
    F32 = "F32", 32;
    /// IEEE 754 half precision.
    F16 = "F16", 16;
    /// The upper half of an `F32`.
    Bf16 = "BF16", 16;
    /// IEEE 754 double precision.
    F64 = "F64", 64;
    /// Two `F32`: real and imaginary part.
    C64 = "C64", 64;
    /// 8-bit float, 4 bits of exponent (<https://arxiv.org/abs/2209.05433>).
    F8E4M3 = "F8_E4M3", 8;
    /// 8-bit float, 5 bits of exponent.
    F8E5M2 = "F8_E5M2", 8;
    /// `F8_E4M3` without infinities and negative zero (<https://arxiv.org/abs/2206.02915>).
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// `F8_E5M2` without infinities and negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Power of two: the scale of a microscaling block (OCP MX 1.0).
    F8E8M0 = "F8_E8M0", 8;
    /// 6-bit float of OCP MX 1.0.
    F6E2M3 = "F6_E2M3", 6;
    /// 6-bit float of OCP MX 1.0.
    F6E3M2 = "F6_E3M2", 6;
    /// 4-bit float of OCP MX 1.0.
    F4 = "F4", 4;
    /// A byte that is 0 or 1.
    Bool = "BOOL", 8;
    /// Signed byte.
    I8 = "I8", 8;
    /// Unsigned byte.
    U8 = "U8", 8;
    /// Signed 16 bits.
    I16 = "I16", 16;
    /// Unsigned 16 bits.
    U16 = "U16", 16;
    /// Signed 32 bits.
    I32 = "I32", 32;
    /// Unsigned 32 bits.
    U32 = "U32", 32;
    /// Signed 64 bits.
    I64 = "I64", 64;
    /// Unsigned 64 bits.
    U64 = "U64", 64;
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Floating-point types of weights; they widen to f32 exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatDtype {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
}

impl FloatDtype {
    /// Returns `dtype` as a floating-point type of weights, if it is one.
    pub fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::F16 => Some(Self::F16),
            Dtype::Bf16 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Reads element `index` of little-endian bytes as f32.
    pub(crate) fn read(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            Self::F32 => f32::from_le_bytes(bytes.as_chunks().0[index]),
            Self::F16 => f16::from_le_bytes(bytes.as_chunks().0[index]).to_f32(),
            Self::Bf16 => bf16::from_le_bytes(bytes.as_chunks().0[index]).to_f32(),
        }
    }

    /// Widens little-endian elements from `first` on to f32.
    pub(crate) fn widen(self, bytes: &[u8], first: usize, out: &mut [f32]) {
        let size = self.bytes();
        let bytes = &bytes[first * size..][..out.len() * size];
        match self {
            Self::F32 => {
                for (value, stored) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_le_bytes(*stored);
                }
            }
            Self::Bf16 => {
                for (value, stored) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*stored)) << 16);
                }
            }
            Self::F16 => widen_f16(bytes.as_chunks().0, out),
        }
    }

    /// Returns the number of bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Works in aligned blocks, so that `half` can use conversion instructions although elements may be unaligned in the
/// file.
fn widen_f16(stored: &[[u8; 2]], out: &mut [f32]) {
    const BLOCK: usize = 256;
    let mut aligned = [f16::ZERO; BLOCK];
    for (stored, out) in stored.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
        let aligned = &mut aligned[..stored.len()];
        for (value, bytes) in aligned.iter_mut().zip(stored) {
            *value = f16::from_le_bytes(*bytes);
        }
        aligned.convert_to_f32_slice(out);
    }
}
