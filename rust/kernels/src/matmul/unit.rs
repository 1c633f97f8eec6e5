//! Products of many rows with a matrix unit.
//!
//! The unit computes the sums of a block or group of inputs, and vectors add them to the outputs as the register tiles do:
//! with the same operations in the same order. As all sums are exact, all bits are the same.
//!
//! Two tiles of rows are multiplied with two panels at a time, so that each tile that the unit loads is used twice. While
//! the unit computes, vectors add the sums that it computed before.

use std::marker::PhantomData;

use super::activations::{BlockOfRows, BlockOnUnit, GroupsOfRows, group_word};
use super::panels::{Multiplier, Panels, Pass, Weights, write};
use super::tile::{MAX_TILE_PANELS, add_scaled, halves, load_row, store_row};
use super::unroll::unroll;
use crate::arch::{ByteLine, Dot, DotKernel, LANES, LINE, MatrixKernel, MatrixUnit, RowTile, TileSums, Tiles};
use crate::quant::grouped::{self, Factors};
use crate::quant::integer::{BLOCK_PAIRS, PAIR_QUADS, Unpack, pairs};

/// Maximum number of tiles of rows that are multiplied at a time.
const TILES: usize = 2;

/// Number of panels that are multiplied at a time.
const PANELS: usize = 2;

impl<W: Weights> MatrixKernel for Panels<'_, '_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot, M: MatrixUnit>(mut self, simd: S, unit: M) {
        self.many_rows::<S, OnUnit<M>, LANES, MAX_TILE_PANELS>(simd, OnUnit(unit));
    }
}

/// Tiles of a matrix unit.
#[derive(Clone, Copy)]
struct OnUnit<M>(M);

impl<M: MatrixUnit> Multiplier for OnUnit<M> {
    #[inline(always)]
    fn multiply<S: Dot, U: Unpack, const R: usize, const P: usize>(
        self,
        simd: S,
        pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        first_block: usize,
    ) {
        simd.vectorize_dot(UnitTiles { unit: self.0, pass, lines, first_block, format: PhantomData::<U> });
    }
}

/// Product of some blocks of P panels with all tiles of a task, of R rows each.
struct UnitTiles<'a, 'o, M, U, const R: usize, const P: usize> {
    unit: M,
    pass: Pass<'a, 'o, R, P>,
    lines: [&'a [ByteLine]; P],
    /// Index of the block at the beginning of `lines`.
    first_block: usize,
    format: PhantomData<U>,
}

impl<M: MatrixUnit, U: Unpack, const R: usize, const P: usize> DotKernel for UnitTiles<'_, '_, M, U, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        const { assert!(S::WEIGHT_BIAS == M::WEIGHT_BIAS && !S::BY_CODES, "both multiply the same bytes") }
        const { assert!(R == LANES && P.is_multiple_of(PANELS), "tiles have sixteen rows") }
        let unit = self.unit;
        // SAFETY: these are the only tiles of this thread: kernels with a unit do not run each other.
        unsafe {
            if const { U::FACTORS.is_none() } {
                self.multiply_all::<S, _, LANES, 1>(simd, unit.configure());
            } else if const { halves::<U>() } {
                self.multiply_all::<S, _, { PAIR_QUADS / 2 }, 2>(simd, unit.configure());
            } else {
                self.multiply_all::<S, _, PAIR_QUADS, 1>(simd, unit.configure());
            }
        }
    }
}

/// Sums that the unit computes at a time, of each part of a group, `[part][tile][panel][row][column]`.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Computed<const PARTS: usize, const T: usize>([[[TileSums; PANELS]; T]; PARTS]);

/// Activations of T tiles of rows in some blocks.
struct Inputs<'a, const T: usize> {
    blocks: [&'a [BlockOfRows<LANES>]; T],
    /// Scales and sums of the groups, for weights whose groups have factors.
    groups: [&'a [GroupsOfRows<LANES>]; T],
}

impl<M, U: Unpack, const R: usize, const P: usize> UnitTiles<'_, '_, M, U, R, P> {
    /// Multiplies all tiles of rows with all panels. Each part of a block or group has `QUADS` quads, or two tiles of them.
    #[inline(always)]
    fn multiply_all<S: Dot, X: Tiles<QUADS>, const QUADS: usize, const PARTS: usize>(mut self, simd: S, mut tiles: X) {
        if self.pass.blocks.start == 0 {
            self.pass.sums.fill([[[0.0; LANES]; P]; R]);
        }
        let mut computed = [Computed([[[[[0; LANES]; LANES]; PANELS]; TILES]; PARTS]); 2];
        let count = self.pass.sums.len();
        for first in (0..count - count % TILES).step_by(TILES) {
            self.add_tiles::<S, X, QUADS, PARTS, TILES>(simd, &mut tiles, first, &mut computed);
        }
        if !count.is_multiple_of(TILES) {
            let mut computed = [Computed([[[[[0; LANES]; LANES]; PANELS]; 1]; PARTS]); 2];
            self.add_tiles::<S, X, QUADS, PARTS, 1>(simd, &mut tiles, count - 1, &mut computed);
        }
    }

    /// Adds the products of T tiles of rows, from tile `tile` of the task on, to their sums.
    #[inline(always)]
    fn add_tiles<S: Dot, X: Tiles<QUADS>, const QUADS: usize, const PARTS: usize, const T: usize>(
        &mut self,
        simd: S,
        tiles: &mut X,
        tile: usize,
        computed: &mut [Computed<PARTS, T>; 2],
    ) {
        let Pass { x, cols, first_tile, ref blocks, next_weights, next_lines, .. } = self.pass;
        let mut inputs = Inputs { blocks: [&[]; T], groups: [&[]; T] };
        for t in 0..T {
            inputs.blocks[t] = &x.tile(first_tile + tile + t)[blocks.clone()];
            if const { U::FACTORS.is_some() } {
                inputs.groups[t] = &x.groups(first_tile + tile + t)[blocks.clone()];
            }
        }
        let (products, of_block) = if const { U::FACTORS.is_some() } {
            ((cols / grouped::GROUP).min(blocks.end * BLOCK_PAIRS) - blocks.start * BLOCK_PAIRS, BLOCK_PAIRS)
        } else {
            (blocks.len(), 1)
        };
        let (steps, lines_each) = (products * (P / PANELS), (T * next_lines).div_ceil(products));
        // The sums of a step are added while the unit computes the next ones.
        for step in 0..=steps {
            if step < steps {
                let at = At::<P>::new(step, of_block);
                self.compute::<X, QUADS, PARTS, T>(tiles, &inputs, at, &mut computed[step % 2]);
                let next = tile * next_lines + at.product * lines_each;
                for weights in &next_weights[at.panel..][..PANELS] {
                    for line in next..(next + lines_each).min((tile + T) * next_lines) {
                        simd.prefetch(weights.wrapping_add(line).cast());
                    }
                }
            }
            if step > 0 {
                let at = At::new(step - 1, of_block);
                self.add_computed::<S, PARTS, T>(simd, &inputs, at, tile, &computed[(step - 1) % 2]);
            }
        }
        if let Some((out, columns)) = &mut self.pass.out {
            for (tile, sums) in (tile..tile + T).zip(&self.pass.sums[tile..]) {
                write(sums, out, tile * R, columns);
            }
        }
    }

    /// Computes the sums of a block or group with the unit.
    #[inline(always)]
    fn compute<X: Tiles<QUADS>, const QUADS: usize, const PARTS: usize, const T: usize>(
        &self,
        tiles: &mut X,
        inputs: &Inputs<'_, T>,
        at: At<P>,
        Computed(computed): &mut Computed<PARTS, T>,
    ) {
        let block = self.pass.blocks.start + at.block;
        let mut w = [&[][..]; PANELS];
        for (w, lines) in w.iter_mut().zip(&self.lines[at.panel..]) {
            *w = U::quad_lines(U::block(lines, block - self.first_block));
        }
        let mut x = [&[[[0; LINE]; LANES]; 2]; T];
        for (x, blocks) in x.iter_mut().zip(inputs.blocks) {
            *x = BlockOnUnit::new(&blocks[at.block]).tiles;
        }
        if const { U::FACTORS.is_some() } {
            let first_line = at.group * (w[0].len() / BLOCK_PAIRS);
            for (part, computed) in computed.iter_mut().enumerate() {
                let quad = at.group % 2 * PAIR_QUADS + part * QUADS;
                let (x, w) = (steps(x, at.group / 2), lines(w, first_line + part * QUADS));
                tiles.multiply::<T, 1>(x, quad, w, computed);
            }
        } else if pairs(self.pass.cols, block) == BLOCK_PAIRS {
            tiles.multiply::<T, 2>(x, 0, lines(w, 0), &mut computed[0]);
        } else {
            tiles.multiply::<T, 1>(steps(x, 0), 0, lines(w, 0), &mut computed[0]);
        }
    }

    /// Adds the computed sums of a block or group to the sums of their tiles: `sums += computed * (factor * scale)`, of each
    /// part, and then the products of the offsets with the sums of the activations.
    #[inline(always)]
    fn add_computed<S: Dot, const PARTS: usize, const T: usize>(
        &mut self,
        simd: S,
        inputs: &Inputs<'_, T>,
        at: At<P>,
        tile: usize,
        Computed(computed): &Computed<PARTS, T>,
    ) {
        let block = self.pass.blocks.start + at.block;
        let (mut factors, mut offsets) = ([[simd.splat(0.0); PANELS]; PARTS], [[simd.splat(0.0); PANELS]; PARTS]);
        for p in 0..PANELS {
            let of_panel = U::block(self.lines[at.panel + p], block - self.first_block);
            if const { U::FACTORS.is_none() } {
                factors[0][p] = U::block_scale(simd, self.pass.block_scales[at.panel + p], block, of_panel);
                continue;
            }
            let pair = U::pair(simd, of_panel, at.group);
            for part in 0..PARTS {
                factors[part][p] = U::factor(simd, pair, part);
                if const { has_offsets::<U>() } {
                    offsets[part][p] = U::factor(simd, pair, PARTS + part);
                }
            }
        }
        for (t, of_tile) in self.pass.sums[tile..].iter_mut().enumerate().take(T) {
            let BlockOnUnit { scales, starts, .. } = BlockOnUnit::new(&inputs.blocks[t][at.block]);
            let (mut scales, mut starts, mut sums_of_x) = (scales, [starts; PARTS], [starts; PARTS]);
            if const { U::FACTORS.is_some() } {
                let words = &inputs.groups[t][at.block][at.group];
                scales = &words[group_word::SCALE];
                for part in 0..PARTS {
                    let [start, sum] = if PARTS == 1 {
                        [group_word::START, group_word::SUM]
                    } else {
                        [group_word::HALF_STARTS + part, group_word::HALF_SUMS + part]
                    };
                    (starts[part], sums_of_x[part]) = (&words[start], &words[sum]);
                }
            }
            for (r, saved) in of_tile.iter_mut().enumerate() {
                let saved = saved[at.panel..].first_chunk_mut().expect("a pair of panels");
                let mut sums = [simd.splat(0.0); PANELS];
                load_row(simd, saved, &mut sums);
                for part in 0..PARTS {
                    let start = simd.splat_i32(starts[part][r]);
                    let mut integers = [start; PANELS];
                    unroll!(p in 0..PANELS {
                        integers[p] = simd.add_i32(simd.load_i32(&computed[part][t][p][r]), start);
                    });
                    add_scaled(simd, &mut sums, &integers, &factors[part], f32::from_bits(scales[r].cast_unsigned()));
                }
                if const { has_offsets::<U>() } {
                    for part in 0..PARTS {
                        let sum_of_x = simd.splat(f32::from_bits(sums_of_x[part][r].cast_unsigned()));
                        unroll!(p in 0..PANELS { sums[p] = simd.mul_add(offsets[part][p], sum_of_x, sums[p]) });
                    }
                }
                store_row(simd, &sums, saved);
            }
        }
    }
}

/// Returns whether groups have offsets.
const fn has_offsets<U: Unpack>() -> bool {
    matches!(U::FACTORS, Some(Factors { offsets: true, .. }))
}

/// Place of the sums that the unit computes in one step.
#[derive(Clone, Copy)]
struct At<const P: usize> {
    /// Index of the product of a panel: of a block, or of a group if these have factors.
    product: usize,
    /// Index of its block among the blocks of the pass, and of its group in the block.
    block: usize,
    group: usize,
    /// First of its panels.
    panel: usize,
}

impl<const P: usize> At<P> {
    /// Returns the place of step `step` if a block has `of_block` products.
    #[inline(always)]
    fn new(step: usize, of_block: usize) -> Self {
        let (product, panel) = (step / (P / PANELS), step % (P / PANELS) * PANELS);
        Self { product, block: product / of_block, group: product % of_block, panel }
    }
}

/// Returns `STEPS` tiles of the inputs of each tile of rows, from tile `first` on.
#[inline(always)]
fn steps<const T: usize, const STEPS: usize>(x: [&[RowTile; 2]; T], first: usize) -> [&[RowTile; STEPS]; T] {
    x.map(|x| x[first..].first_chunk().expect("tiles of a block"))
}

/// Returns the lines of `STEPS` tiles of each panel, from line `first` on.
#[inline(always)]
fn lines<const QUADS: usize, const STEPS: usize>(
    w: [&[ByteLine]; PANELS],
    first: usize,
) -> [&[[ByteLine; QUADS]; STEPS]; PANELS] {
    w.map(|w| w[first..].as_chunks().0.first_chunk().expect("lines of a block"))
}
