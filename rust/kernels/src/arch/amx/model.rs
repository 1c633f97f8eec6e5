//! Software model of the matrix unit's instructions, for tests on machines without AMX. It interprets the text of the
//! steps that machines with AMX run, as the operation sections of the Intel SDM define each instruction (volume 2,
//! LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBSUD). What raises an exception there, panics here.

use std::array::from_fn;
use std::cell::Cell;
use std::collections::HashMap;
use std::marker::PhantomData;

use super::steps::{PALETTE, TILES, TileConfig, step_text};
use crate::arch::matrix::{MatrixUnit, RowTile, TileSums, Tiles};
use crate::arch::{ByteLine, LANES, LINE};

/// Maximum number of rows of a tile.
const MAX_ROWS: usize = 16;

thread_local! {
    /// Whether this thread has configured tiles, for tests of their release.
    static IS_CONFIGURED: Cell<bool> = const { Cell::new(false) };

    /// Number of products of tiles that this thread computed, for tests of the dispatch.
    static PRODUCTS: Cell<usize> = const { Cell::new(0) };
}

/// Model of a matrix unit.
#[derive(Clone, Copy, Debug)]
pub struct Model;

impl Model {
    /// Returns whether this thread has tiles that were not released.
    #[must_use]
    pub fn is_configured() -> bool {
        IS_CONFIGURED.get()
    }

    /// Returns the number of products of tiles that this thread computed since the last call.
    #[must_use]
    pub fn take_products() -> usize {
        PRODUCTS.take()
    }
}

impl MatrixUnit for Model {
    const WEIGHT_BIAS: u8 = 128;

    type Tiles = ModelTiles;

    unsafe fn configure(self) -> ModelTiles {
        assert!(!IS_CONFIGURED.replace(true), "the tiles of this thread are in use");
        ModelTiles { registers: Registers::configured(&TileConfig::new()), not_send: PhantomData }
    }
}

/// Tile registers of a thread.
pub struct ModelTiles {
    registers: Registers,
    not_send: PhantomData<*mut ()>,
}

impl Drop for ModelTiles {
    fn drop(&mut self) {
        IS_CONFIGURED.set(false);
    }
}

impl Tiles for ModelTiles {
    fn clear<const ROW: usize>(&mut self) {
        self.registers.run([step_text!(clear 0), step_text!(clear 1)][ROW], &HashMap::new(), &mut []);
    }

    fn load(&mut self, w: [&[ByteLine; LANES]; 2]) {
        let [w0, w1] = w.map(|w| bytemuck::cast_slice(w));
        self.registers.run(step_text!(load), &HashMap::from([("w0", w0), ("w1", w1)]), &mut []);
    }

    fn add<const ROW: usize>(&mut self, x: &RowTile) {
        PRODUCTS.set(PRODUCTS.get() + 1);
        let memory = HashMap::from([("x", x.as_flattened())]);
        self.registers.run([step_text!(add 0), step_text!(add 1)][ROW], &memory, &mut []);
    }

    fn store<const ROW: usize>(&self, sums: &mut [TileSums; 2]) {
        let mut registers = self.registers.clone();
        registers.run([step_text!(store 0), step_text!(store 1)][ROW], &HashMap::new(), bytemuck::cast_slice_mut(sums));
    }
}

/// Tile: its rows, of which those that its configuration lacks are zero.
type Data = [[u8; LINE]; MAX_ROWS];

/// State of the tile registers.
#[derive(Clone)]
struct Registers {
    /// Number of rows, and of bytes of a row, of each tile.
    sizes: [[usize; 2]; TILES],
    data: [Data; TILES],
}

impl Registers {
    /// LDTILECFG: #GP unless the palette is known, reserved bytes are zero, no tile is larger than the palette allows, and
    /// tiles have no rows if and only if these have no bytes.
    fn configured(config: &TileConfig) -> Self {
        assert_eq!(config.palette, PALETTE, "palette");
        assert_eq!((config.start_row, config.reserved), (0, [0; 14]), "reserved bytes");
        assert!(config.row_bytes[TILES..].iter().all(|bytes| *bytes == 0), "tiles that do not exist");
        assert!(config.rows[TILES..].iter().all(|rows| *rows == 0), "tiles that do not exist");
        let size = |tile| {
            let (rows, bytes) = (usize::from(config.rows[tile]), usize::from(config.row_bytes[tile]));
            assert!(rows <= MAX_ROWS && bytes <= LINE && (rows == 0) == (bytes == 0), "{rows} rows of {bytes} bytes");
            [rows, bytes]
        };
        // Whatever the registers held before: steps must write them first.
        Self { sizes: from_fn(size), data: [[[0xa5; LINE]; MAX_ROWS]; TILES] }
    }

    /// Runs a step, given its text. Its operands are parts of `memory`, and `sums`, which it may write.
    fn run(&mut self, text: &str, memory: &HashMap<&str, &[u8]>, sums: &mut [u8]) {
        for line in text.lines() {
            let (name, operands) = line.split_once(' ').expect("an instruction and its operands");
            let operands: Vec<_> = operands.split(", ").collect();
            match (name, &operands[..]) {
                ("tilezero", [tile]) => self.data[self.tile(tile)] = [[0; LINE]; MAX_ROWS],
                ("tileloadd", [tile, from]) => {
                    let (from, at) = address(from);
                    self.load(self.tile(tile), &memory[from][at..]);
                }
                ("tilestored", [to, tile]) => {
                    let (to, at) = address(to);
                    assert_eq!(to, "sums", "only sums are written");
                    self.store(self.tile(tile), &mut sums[at..]);
                }
                ("tdpbsud", [sums, x, w]) => self.multiply(self.tile(sums), self.tile(x), self.tile(w)),
                _ => panic!("{line:?} is not in the model"),
            }
        }
    }

    /// Returns the index of a tile. #UD if it is not configured.
    fn tile(&self, name: &str) -> usize {
        let tile: usize = name.strip_prefix("tmm").expect("a tile").parse().expect("the number of a tile");
        let [rows, bytes] = self.sizes[tile];
        assert!(rows > 0 && bytes % 4 == 0, "{name} has {rows} rows of {bytes} bytes");
        tile
    }

    /// TILELOADD, with a stride of [`LINE`] bytes: bytes and rows that the tile lacks become zero.
    fn load(&mut self, tile: usize, from: &[u8]) {
        let [rows, bytes] = self.sizes[tile];
        self.data[tile] = [[0; LINE]; MAX_ROWS];
        for (row, to) in self.data[tile].iter_mut().enumerate().take(rows) {
            to[..bytes].copy_from_slice(&from[row * LINE..][..bytes]);
        }
    }

    /// TILESTORED, with a stride of [`LINE`] bytes.
    fn store(&self, tile: usize, to: &mut [u8]) {
        let [rows, bytes] = self.sizes[tile];
        for (row, from) in self.data[tile].iter().enumerate().take(rows) {
            to[row * LINE..][..bytes].copy_from_slice(&from[..bytes]);
        }
    }

    /// TDPBSUD: adds the products of four signed bytes of `x` with four unsigned bytes of `w` to each sum. #UD unless the three
    /// tiles are different and their sizes match.
    fn multiply(&mut self, sums: usize, x: usize, w: usize) {
        assert!(sums != x && sums != w && x != w, "the tiles of a product are different");
        let ([rows, sum_bytes], [x_rows, x_bytes], [quads, w_bytes]) = (self.sizes[sums], self.sizes[x], self.sizes[w]);
        assert_eq!((rows, sum_bytes, x_bytes / 4), (x_rows, w_bytes, quads), "sizes of the tiles of a product");
        let [x, w] = [x, w].map(|tile| self.data[tile]);
        for (row, sums) in self.data[sums].iter_mut().enumerate() {
            for (column, sum) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let mut total = i32::from_le_bytes(*sum);
                for quad in 0..quads {
                    for byte in 0..4 {
                        let product =
                            i32::from(x[row][4 * quad + byte].cast_signed()) * i32::from(w[quad][4 * column + byte]);
                        total = total.wrapping_add(product);
                    }
                }
                let is_inside = row < rows && 4 * column < sum_bytes;
                *sum = if is_inside { total.to_le_bytes() } else { [0; 4] };
            }
        }
    }
}

/// Returns the name and the offset of a memory operand: `[{name} + {stride}*1 + offset]`.
fn address(operand: &str) -> (&str, usize) {
    let parts = operand.strip_prefix("[{").and_then(|operand| operand.strip_suffix(']'));
    let (name, offset) = parts.and_then(|parts| parts.split_once("} + {stride}*1 + ")).expect("an address");
    (name, offset.parse().expect("an offset"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns bytes that vary.
    fn bytes(seed: usize) -> [u8; LINE] {
        from_fn(|i| ((64 * seed + i).wrapping_mul(2_654_435_761) >> 13) as u8)
    }

    /// Compares the products of a unit with sums in plain arithmetic.
    fn check<M: MatrixUnit, const ROWS: usize, const STEPS: usize>(unit: M) {
        let x = from_fn(|tile| from_fn(|step| from_fn(|row| bytes(1000 * tile + 100 * step + row))));
        let w =
            from_fn(|panel| from_fn(|step| from_fn(|quad| ByteLine(bytes(5000 + 1000 * panel + 100 * step + quad)))));
        let (x, w): ([[RowTile; STEPS]; ROWS], [[[ByteLine; LANES]; STEPS]; 2]) = (x, w);
        let mut sums = [[[[-1; LANES]; LANES]; 2]; ROWS];
        // SAFETY: there are no other tiles of this thread.
        let mut tiles = unsafe { unit.configure() };
        tiles.clear::<0>();
        tiles.clear::<1>();
        for step in 0..STEPS {
            tiles.load(w.each_ref().map(|w| &w[step]));
            tiles.add::<0>(&x[0][step]);
            if ROWS > 1 {
                tiles.add::<1>(&x[ROWS - 1][step]);
            }
        }
        tiles.store::<0>(&mut sums[0]);
        if ROWS > 1 {
            tiles.store::<1>(&mut sums[ROWS - 1]);
        }
        for (x, sums) in x.iter().zip(&sums) {
            for (w, sums) in w.iter().zip(sums) {
                for (row, sums) in sums.iter().enumerate() {
                    for (column, sum) in sums.iter().enumerate() {
                        let mut exact = 0;
                        for (x, w) in x.iter().zip(w) {
                            for input in 0..LINE {
                                let weight = i32::from(w[input / 4].0[4 * column + input % 4]);
                                exact += i32::from(x[row][input].cast_signed()) * weight;
                            }
                        }
                        assert_eq!(*sum, exact, "row {row}, column {column}, {STEPS} steps");
                    }
                }
            }
        }
    }

    /// Compares all steps with plain arithmetic.
    fn check_all<M: MatrixUnit>(unit: M) {
        check::<M, 1, 1>(unit);
        check::<M, 2, 1>(unit);
        check::<M, 1, 2>(unit);
        check::<M, 2, 2>(unit);
    }

    #[test]
    fn steps_multiply_exactly() {
        check_all(Model);
        assert!(!Model::is_configured());
        #[cfg(all(target_arch = "x86_64", feature = "amx"))]
        if let Some(isa) = crate::arch::Amx::detect() {
            struct CheckAll;

            impl crate::arch::MatrixKernel for CheckAll {
                type Output = ();

                fn run<S: crate::arch::Dot, M: MatrixUnit>(self, _: S, unit: M) {
                    check_all(unit);
                }
            }

            isa.run_matrix(CheckAll);
        }
    }

    #[test]
    #[should_panic(expected = "sizes of the tiles of a product")]
    fn products_of_other_sizes_are_refused() {
        let mut config = TileConfig::new();
        config.rows[6] = 8;
        let mut registers = Registers::configured(&config);
        registers.run("tdpbsud tmm0, tmm6, tmm4", &HashMap::new(), &mut []);
    }

    #[test]
    #[should_panic(expected = "17 rows of 64 bytes")]
    fn tiles_beyond_the_palette_are_refused() {
        let mut config = TileConfig::new();
        config.rows[3] = 17;
        Registers::configured(&config);
    }
}
