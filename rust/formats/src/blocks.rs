//! Block layouts: rows of quantized weights in blocks of codes, with the scales that turn codes into values.

/// Declares each layout once: variant, name, inputs and bytes of a block.
macro_rules! layouts {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $inputs:literal, $bytes:literal;)*) => {
        /// Layout of a block whose codes the kernels can multiply directly.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum BlockLayout { $($(#[$doc])* $variant,)* }

        impl BlockLayout {
            /// All layouts.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the name, which is also that of the kernels' format.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the number of inputs in a block.
            pub const fn inputs(self) -> usize {
                match self { $(Self::$variant => $inputs,)* }
            }

            /// Returns the number of bytes in a block.
            pub const fn bytes(self) -> usize {
                match self { $(Self::$variant => $bytes,)* }
            }
        }
    };
}

layouts! {
    /// ggml's `block_q4_0`: f16 d; 16 bytes of codes. Value: d * (code - 8).
    Q4_0 = "q4_0", 32, 18;
    /// ggml's `block_q4_1`: f16 d and m; 16 bytes of codes. Value: d * code + m.
    Q4_1 = "q4_1", 32, 20;
    /// ggml's `block_q5_0`: f16 d; 4 bytes of high bits; 16 bytes of low bits. Value: d * (code - 16).
    Q5_0 = "q5_0", 32, 22;
    /// ggml's `block_q5_1`: f16 d and m; 4 bytes of high bits; 16 bytes of low bits. Value: d * code + m.
    Q5_1 = "q5_1", 32, 24;
    /// ggml's `block_q8_0`: f16 d; 32 codes. Value: d * code.
    Q8_0 = "q8_0", 32, 34;
    /// ggml's `block_q2_K`: 16 bytes of 4-bit scales and minima; 64 bytes of codes; f16 d and dmin.
    Q2K = "q2_k", 256, 84;
    /// ggml's `block_q3_K`: 32 bytes of high bits; 64 bytes of low bits; 12 bytes of 6-bit scales; f16 d.
    Q3K = "q3_k", 256, 110;
    /// ggml's `block_q4_K`: f16 d and dmin; 12 bytes of 6-bit scales and minima; 128 bytes of codes.
    Q4K = "q4_k", 256, 144;
    /// ggml's `block_q5_K`: f16 d and dmin; 12 bytes of 6-bit scales and minima; 32 bytes of high bits; 128 bytes of low
    /// bits.
    Q5K = "q5_k", 256, 176;
    /// ggml's `block_q6_K`: 128 and 64 bytes of codes; 16 scales; f16 d.
    Q6K = "q6_k", 256, 210;
    /// ggml's `block_iq4_nl`: f16 d; 16 bytes of indices to a table.
    Iq4Nl = "iq4_nl", 32, 18;
    /// ggml's `block_iq4_xs`: f16 d; 6 bytes of 6-bit scales; 128 bytes of indices to a table.
    Iq4Xs = "iq4_xs", 256, 136;
    /// ggml's `block_iq2_xxs`: f16 d; for each 32 inputs, 4 bytes of indices to a grid and 4 of signs and a 4-bit scale.
    Iq2Xxs = "iq2_xxs", 256, 66;
    /// ggml's `block_iq2_xs`: f16 d; 64 bytes of indices to a grid with signs; 8 bytes of 4-bit scales.
    Iq2Xs = "iq2_xs", 256, 74;
    /// ggml's `block_iq2_s`: f16 d; 32 bytes of indices to a grid; 32 of signs; 8 of high bits; 8 of 4-bit scales.
    Iq2S = "iq2_s", 256, 82;
    /// ggml's `block_iq3_xxs`: f16 d; 64 bytes of indices to a grid; 32 of signs and 4-bit scales.
    Iq3Xxs = "iq3_xxs", 256, 98;
    /// ggml's `block_iq3_s`: f16 d; 64 bytes of indices to a grid; 8 of high bits; 32 of signs; 4 of 4-bit scales.
    Iq3S = "iq3_s", 256, 110;
    /// ggml's `block_mxfp4`: a power of two; 16 bytes of indices to a table.
    Mxfp4 = "mxfp4", 32, 17;
    /// f16 scale; u8 zero point; 16 bytes of codes, input i in the low half of byte i and input 16 + i in the high
    /// half. Value: scale * (code - zero point).
    U4 = "u4", 32, 19;
    /// f16 scale; u16 zero point; 32 codes. Value: scale * (code - zero point).
    U8 = "u8", 32, 36;
}
