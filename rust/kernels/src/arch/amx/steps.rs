//! Steps of the matrix unit, and the configuration that they need. Their text is assembled for machines with AMX, and
//! interpreted by the software model of the instructions in tests.

use crate::arch::{LANES, LINE};

/// Palette of eight tiles of up to sixteen rows of 64 bytes.
pub(super) const PALETTE: u8 = 1;

/// Number of tile registers. Sums are in the first four, `[row][panel]`, activations in two and weights in two.
pub(super) const TILES: usize = 8;

/// Operand of `ldtilecfg` (Intel SDM, volume 1, section "TILECFG"). A tile that is not used has no rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct TileConfig {
    pub palette: u8,
    /// Row at which an interrupted load or store continues.
    pub start_row: u8,
    pub reserved: [u8; 14],
    /// Bytes of a row of each tile.
    pub row_bytes: [u16; 16],
    /// Number of rows of each tile.
    pub rows: [u8; 16],
}

const _: () = assert!(size_of::<TileConfig>() == 64);

impl TileConfig {
    /// Returns the configuration of whole tiles.
    pub(super) const fn new() -> Self {
        let (mut row_bytes, mut rows, mut tile) = ([0; 16], [0; 16], 0);
        while tile < TILES {
            (row_bytes[tile], rows[tile]) = (LINE as u16, LANES as u8);
            tile += 1;
        }
        Self { palette: PALETTE, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

/// Text of the steps of [`Tiles`](crate::arch::Tiles), whose operands are the addresses `w0`, `w1`, `x` and `sums`, and the
/// stride of their rows. A step reads registers that steps before it wrote: no other code uses these registers.
macro_rules! step_text {
    (clear 0) => {
        "tilezero tmm0\ntilezero tmm1\n"
    };
    (clear 1) => {
        "tilezero tmm2\ntilezero tmm3\n"
    };
    (load) => {
        "tileloadd tmm6, [{w0} + {stride}*1 + 0]\ntileloadd tmm7, [{w1} + {stride}*1 + 0]\n"
    };
    (add 0) => {
        "tileloadd tmm4, [{x} + {stride}*1 + 0]\ntdpbsud tmm0, tmm4, tmm6\ntdpbsud tmm1, tmm4, tmm7\n"
    };
    (add 1) => {
        "tileloadd tmm5, [{x} + {stride}*1 + 0]\ntdpbsud tmm2, tmm5, tmm6\ntdpbsud tmm3, tmm5, tmm7\n"
    };
    (store 0) => {
        "tilestored [{sums} + {stride}*1 + 0], tmm0\ntilestored [{sums} + {stride}*1 + 1024], tmm1\n"
    };
    (store 1) => {
        "tilestored [{sums} + {stride}*1 + 0], tmm2\ntilestored [{sums} + {stride}*1 + 1024], tmm3\n"
    };
}

pub(super) use step_text;
