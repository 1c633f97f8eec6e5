//! Tensor types: elements that are stored one by one, and blocks of codes with their scales.
//!
//! Each block type is a line in the table below and a file, which dequantizes one block: here, or in the kernels, which
//! also multiply it. The order of floating-point operations is that of the `gguf` package
//! (<https://github.com/ggml-org/llama.cpp/tree/master/gguf-py>), whose results the tests compare bit by bit.

mod bits;
mod fp4;
mod iq1;
mod iq4;
mod k_scales;
mod q1_0;
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
mod ternary;

use std::fmt;

use ferrule_kernels::quant::{Iq2SBlock, Iq2XsBlock, Iq2XxsBlock, Iq3SBlock, Iq3XxsBlock, PointFormat};

use crate::blocks::BlockLayout;
use crate::dtype::Dtype;

/// Maximum number of inputs in a block.
const MAX_INPUTS: usize = 256;

/// Declares each block type once: variant, id in the file, name, inputs and bytes of a block, the function that
/// dequantizes it, and its layout if kernels can multiply it directly.
macro_rules! block_types {
    ($($variant:ident = $id:literal, $name:literal, $inputs:literal, $bytes:literal, $dequantize:path
        $(, $layout:ident)?;)*) => {
        /// Block type of ggml.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names are ggml's")]
        pub enum BlockType { $($variant,)* }

        impl BlockType {
            /// All block types.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            fn of_id(id: u32) -> Option<Self> {
                match id { $($id => Some(Self::$variant),)* _ => None }
            }

            /// Returns the id in files.
            pub fn id(self) -> u32 {
                match self { $(Self::$variant => $id,)* }
            }

            /// Returns the name in ggml.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the number of inputs in a block.
            pub fn inputs(self) -> usize {
                match self { $(Self::$variant => $inputs,)* }
            }

            /// Returns the number of bytes in a block.
            pub fn bytes(self) -> usize {
                match self { $(Self::$variant => $bytes,)* }
            }

            /// Returns the layout of the blocks, if kernels can multiply them directly.
            pub fn layout(self) -> Option<BlockLayout> {
                match self { $($(Self::$variant => Some(BlockLayout::$layout),)?)* _ => None }
            }

            /// Dequantizes whole blocks.
            fn dequantize_blocks(self, blocks: &[u8], out: &mut [f32]) {
                match self {
                    $(Self::$variant => {
                        let (blocks, out) = (blocks.as_chunks::<$bytes>().0, out.as_chunks_mut::<$inputs>().0);
                        blocks.iter().zip(out).for_each(|(block, out)| $dequantize(block, out));
                    })*
                }
            }
        }

        $($(
            const _: () = assert!(
                BlockLayout::$layout.inputs() == $inputs && BlockLayout::$layout.bytes() == $bytes
            );
        )?)*
        const _: () = assert!($($inputs <= MAX_INPUTS &&)* true);
    };
}

block_types! {
    Q4_0 = 2, "Q4_0", 32, 18, q4_0::dequantize, Q4_0;
    Q4_1 = 3, "Q4_1", 32, 20, q4_1::dequantize, Q4_1;
    Q5_0 = 6, "Q5_0", 32, 22, q5_0::dequantize, Q5_0;
    Q5_1 = 7, "Q5_1", 32, 24, q5_1::dequantize, Q5_1;
    Q8_0 = 8, "Q8_0", 32, 34, q8_0::dequantize, Q8_0;
    Q2K = 10, "Q2_K", 256, 84, q2_k::dequantize, Q2K;
    Q3K = 11, "Q3_K", 256, 110, q3_k::dequantize, Q3K;
    Q4K = 12, "Q4_K", 256, 144, q4_k::dequantize, Q4K;
    Q5K = 13, "Q5_K", 256, 176, q5_k::dequantize, Q5K;
    Q6K = 14, "Q6_K", 256, 210, q6_k::dequantize, Q6K;
    Iq2Xxs = 16, "IQ2_XXS", 256, 66, Iq2XxsBlock::dequantize, Iq2Xxs;
    Iq2Xs = 17, "IQ2_XS", 256, 74, Iq2XsBlock::dequantize, Iq2Xs;
    Iq3Xxs = 18, "IQ3_XXS", 256, 98, Iq3XxsBlock::dequantize, Iq3Xxs;
    Iq1S = 19, "IQ1_S", 256, 50, iq1::dequantize_s;
    Iq4Nl = 20, "IQ4_NL", 32, 18, iq4::dequantize_nl, Iq4Nl;
    Iq3S = 21, "IQ3_S", 256, 110, Iq3SBlock::dequantize, Iq3S;
    Iq2S = 22, "IQ2_S", 256, 82, Iq2SBlock::dequantize, Iq2S;
    Iq4Xs = 23, "IQ4_XS", 256, 136, iq4::dequantize_xs, Iq4Xs;
    Iq1M = 29, "IQ1_M", 256, 56, iq1::dequantize_m;
    Tq1_0 = 34, "TQ1_0", 256, 54, ternary::dequantize_tq1_0;
    Tq2_0 = 35, "TQ2_0", 256, 66, ternary::dequantize_tq2_0;
    Mxfp4 = 39, "MXFP4", 32, 17, fp4::dequantize_mxfp4, Mxfp4;
    Nvfp4 = 40, "NVFP4", 64, 36, fp4::dequantize_nvfp4;
    Q1_0 = 41, "Q1_0", 128, 18, q1_0::dequantize;
}

impl BlockType {
    /// Dequantizes elements from `first` on.
    ///
    /// # Panics
    /// If there are fewer blocks.
    pub(crate) fn dequantize(self, blocks: &[u8], first: usize, out: &mut [f32]) {
        let (inputs, bytes) = (self.inputs(), self.bytes());
        let mut blocks = &blocks[first / inputs * bytes..(first + out.len()).div_ceil(inputs) * bytes];
        let mut out = out;
        // A partial block at either end is dequantized whole and copied.
        let mut skipped = first % inputs;
        while !out.is_empty() {
            let whole = out.len() / inputs;
            if skipped == 0 && whole > 0 {
                let (now, later) = out.split_at_mut(whole * inputs);
                self.dequantize_blocks(&blocks[..whole * bytes], now);
                (out, blocks) = (later, &blocks[whole * bytes..]);
            } else {
                let mut block = [0.0; MAX_INPUTS];
                let block = &mut block[..inputs];
                self.dequantize_blocks(&blocks[..bytes], block);
                let count = out.len().min(inputs - skipped);
                let (now, later) = out.split_at_mut(count);
                now.copy_from_slice(&block[skipped..skipped + count]);
                (out, blocks, skipped) = (later, &blocks[bytes..], 0);
            }
        }
    }
}

/// Stored type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// One element at a time.
    Elements(Dtype),
    /// Blocks of codes with their scales.
    Blocks(BlockType),
}

/// A type id that is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnsupportedType {
    /// ggml has no type with this id.
    Unknown,
    /// ggml has or had the type, but it does not store weights.
    Refused { name: &'static str, reason: &'static str },
}

/// Types of ggml that are not supported, with the reason.
const REFUSED: [(u32, &str, &str); 10] = [
    (4, "Q4_2", "ggml removed it in 2023"),
    (5, "Q4_3", "ggml removed it in 2023"),
    (9, "Q8_1", "it is only for intermediate results"),
    (15, "Q8_K", "it is only for intermediate results"),
    (31, "Q4_0_4_4", REPACKED),
    (32, "Q4_0_4_8", REPACKED),
    (33, "Q4_0_8_8", REPACKED),
    (36, "IQ4_NL_4_4", REPACKED),
    (37, "IQ4_NL_4_8", REPACKED),
    (38, "IQ4_NL_8_8", REPACKED),
];
const REPACKED: &str = "ggml removed it; use a file in Q4_0 or IQ4_NL";

impl TensorType {
    /// Returns the type that a file calls `id`.
    pub(crate) fn of_id(id: u32) -> Result<Self, UnsupportedType> {
        let dtype = match id {
            0 => Dtype::F32,
            1 => Dtype::F16,
            24 => Dtype::I8,
            25 => Dtype::I16,
            26 => Dtype::I32,
            27 => Dtype::I64,
            28 => Dtype::F64,
            30 => Dtype::Bf16,
            _ => return Self::of_block_id(id),
        };
        Ok(Self::Elements(dtype))
    }

    fn of_block_id(id: u32) -> Result<Self, UnsupportedType> {
        match REFUSED.into_iter().find(|(refused, ..)| *refused == id) {
            Some((_, name, reason)) => Err(UnsupportedType::Refused { name, reason }),
            None => BlockType::of_id(id).map(Self::Blocks).ok_or(UnsupportedType::Unknown),
        }
    }

    /// Returns the name in ggml.
    pub fn name(self) -> &'static str {
        match self {
            Self::Elements(dtype) => dtype.name(),
            Self::Blocks(blocks) => blocks.name(),
        }
    }

    /// Returns the elements and the bytes of the smallest unit.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            Self::Elements(dtype) => (1, dtype.bits() as usize / 8),
            Self::Blocks(blocks) => (blocks.inputs(), blocks.bytes()),
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
