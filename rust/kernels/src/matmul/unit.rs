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
use crate::arch::{ByteLine, Dot, DotKernel, LANES, LINE, MatrixKernel, MatrixUnit, TileSums, Tiles};
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
        let Pass { x, cols, first_tile, next_weights, next_lines, .. } = self.pass;
        let blocks = self.pass.blocks.clone();
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
        for step in 0..=steps {
            let [even, odd] = &mut *computed;
            let (to, before) = if step % 2 == 0 { (even, &*odd) } else { (odd, &*even) };
            let before = (step > 0).then(|| self.computed(simd, &inputs, At::new(step - 1, of_block), before));
            if step == steps {
                if let Some(before) = before {
                    for row in (0..T * LANES).step_by(LANES) {
                        before.add::<R, LANES>(simd, &mut self.pass.sums[tile..], row);
                    }
                }
                break;
            }
            let at = At::<P>::new(step, of_block);
            let next = tile * next_lines + at.product * lines_each;
            for weights in &next_weights[at.panel..][..PANELS] {
                for line in next..(next + lines_each).min((tile + T) * next_lines) {
                    simd.prefetch(weights.wrapping_add(line).cast());
                }
            }
            // Writing to outputs that are not in the cache took two fifths of the time.
            if let Some((out, columns)) = &mut self.pass.out {
                let each = (T * LANES).div_ceil(steps);
                let next = (tile + T) * LANES + step * each;
                for row in next..out.rows().len().min(next + each) {
                    for line in out.row(row)[columns.clone()].chunks(LANES) {
                        simd.prefetch(line.as_ptr().cast());
                    }
                }
            }
            let of_block = (tile, at);
            if const { PARTS > 1 } {
                self.compute::<S, X, QUADS, PARTS, T, 1, { LANES / 2 }>(simd, tiles, &inputs, of_block, to, before);
            } else if const { U::FACTORS.is_some() } || pairs(cols, blocks.start + at.block) < BLOCK_PAIRS {
                self.compute::<S, X, QUADS, PARTS, T, 1, LANES>(simd, tiles, &inputs, of_block, to, before);
            } else {
                self.compute::<S, X, QUADS, PARTS, T, 2, { LANES / 2 }>(simd, tiles, &inputs, of_block, to, before);
            }
        }
        if let Some((out, columns)) = &mut self.pass.out {
            for (tile, sums) in (tile..tile + T).zip(&self.pass.sums[tile..]) {
                write(sums, out, tile * R, columns);
            }
        }
    }

    /// Computes the sums of a block or group with the unit. Between its instructions, vectors add the sums that it computed
    /// before.
    #[inline(always)]
    fn compute<
        S: Dot,
        X: Tiles<QUADS>,
        const QUADS: usize,
        const PARTS: usize,
        const T: usize,
        const STEPS: usize,
        const ROWS: usize,
    >(
        &mut self,
        simd: S,
        tiles: &mut X,
        inputs: &Inputs<'_, T>,
        (tile, at): (usize, At<P>),
        Computed(computed): &mut Computed<PARTS, T>,
        before: Option<ComputedSums<'_, S, P, PARTS, T>>,
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
        for (part, computed) in computed.iter_mut().enumerate() {
            tiles.clear::<0>();
            if const { T > 1 } {
                tiles.clear::<1>();
            }
            for step in 0..STEPS {
                let (tile_of_x, quad, line) = if const { U::FACTORS.is_some() } {
                    let first_line = at.group * (w[0].len() / BLOCK_PAIRS);
                    (at.group / 2, at.group % 2 * PAIR_QUADS + part * QUADS, first_line + part * QUADS)
                } else {
                    (step, 0, step * QUADS)
                };
                tiles.load(w.map(|w| w[line..].first_chunk().expect("lines of a block")));
                unroll!(t in 0..T {
                    if const { T > 1 } && t == 1 {
                        tiles.add::<1>(&x[t][tile_of_x], quad);
                        if step + 1 == STEPS {
                            tiles.store::<0>(&mut computed[0]);
                        }
                    } else {
                        tiles.add::<0>(&x[t][tile_of_x], quad);
                    }
                    if let Some(before) = &before {
                        let added = ((part * STEPS + step) * T + t) * ROWS;
                        before.add::<R, ROWS>(simd, &mut self.pass.sums[tile..], added);
                    }
                });
            }
            if const { T > 1 } {
                tiles.store::<1>(&mut computed[T - 1]);
            } else {
                tiles.store::<0>(&mut computed[0]);
            }
        }
    }

    /// Returns computed sums with what they are multiplied with.
    #[inline(always)]
    fn computed<'c, S: Dot, const PARTS: usize, const T: usize>(
        &self,
        simd: S,
        inputs: &Inputs<'c, T>,
        at: At<P>,
        Computed(sums): &'c Computed<PARTS, T>,
    ) -> ComputedSums<'c, S, P, PARTS, T> {
        let block = self.pass.blocks.start + at.block;
        let zero = [[simd.splat(0.0); PANELS]; PARTS];
        let (mut factors, mut offsets) = (zero, has_offsets::<U>().then_some(zero));
        for p in 0..PANELS {
            let of_panel = U::block(self.lines[at.panel + p], block - self.first_block);
            if const { U::FACTORS.is_none() } {
                factors[0][p] = U::block_scale(simd, self.pass.block_scales[at.panel + p], block, of_panel);
                continue;
            }
            let pair = U::pair(simd, of_panel, at.group);
            for part in 0..PARTS {
                factors[part][p] = U::factor(simd, pair, part);
                if let Some(offsets) = &mut offsets {
                    offsets[part][p] = U::factor(simd, pair, PARTS + part);
                }
            }
        }
        let mut scales = [&[0; LANES]; T];
        let (mut starts, mut sums_of_x) = ([[&[0; LANES]; PARTS]; T], [[&[0; LANES]; PARTS]; T]);
        for t in 0..T {
            let of_block = BlockOnUnit::new(&inputs.blocks[t][at.block]);
            if const { U::FACTORS.is_none() } {
                (scales[t], starts[t][0]) = (of_block.scales, of_block.starts);
                continue;
            }
            let words = &inputs.groups[t][at.block][at.group];
            scales[t] = &words[group_word::SCALE];
            for part in 0..PARTS {
                let [start, sum] = if PARTS == 1 {
                    [group_word::START, group_word::SUM]
                } else {
                    [group_word::HALF_STARTS + part, group_word::HALF_SUMS + part]
                };
                (starts[t][part], sums_of_x[t][part]) = (&words[start], &words[sum]);
            }
        }
        ComputedSums { sums, factors, offsets, scales, starts, sums_of_x, panel: at.panel }
    }
}

/// Sums that the unit computed of a block or group, and what they are multiplied with.
struct ComputedSums<'c, S: Dot, const P: usize, const PARTS: usize, const T: usize> {
    sums: &'c [[[TileSums; PANELS]; T]; PARTS],
    factors: [[S::F32; PANELS]; PARTS],
    offsets: Option<[[S::F32; PANELS]; PARTS]>,
    /// Scales of the activations, and starts and sums of their parts.
    scales: [&'c [i32; LANES]; T],
    starts: [[&'c [i32; LANES]; PARTS]; T],
    sums_of_x: [[&'c [i32; LANES]; PARTS]; T],
    /// First of the panels.
    panel: usize,
}

impl<S: Dot, const P: usize, const PARTS: usize, const T: usize> ComputedSums<'_, S, P, PARTS, T> {
    /// Adds ROWS rows from row `first` on, all of one tile, to the sums of their tiles: `sums += computed * (factor * scale)`,
    /// of each part, and then the products of the offsets with the sums of the activations.
    #[inline(always)]
    fn add<const R: usize, const ROWS: usize>(&self, simd: S, to: &mut [[[[f32; LANES]; P]; R]], first: usize) {
        let (t, first) = (first / LANES, first % LANES);
        let scales = rows_from::<_, ROWS>(self.scales[t], first);
        let to: &mut [_; ROWS] = to[t][first..].first_chunk_mut().expect("rows of a tile");
        let (mut starts, mut sums_of_x) = ([scales; PARTS], [scales; PARTS]);
        let mut computed = [[&[[0; LANES]; ROWS]; PANELS]; PARTS];
        for part in 0..PARTS {
            starts[part] = rows_from::<_, ROWS>(self.starts[t][part], first);
            sums_of_x[part] = rows_from::<_, ROWS>(self.sums_of_x[t][part], first);
            computed[part] = self.sums[part][t].each_ref().map(|sums| rows_from(sums, first));
        }
        for r in 0..ROWS {
            let saved = to[r][self.panel..].first_chunk_mut().expect("a pair of panels");
            let mut sums = [simd.splat(0.0); PANELS];
            load_row(simd, saved, &mut sums);
            for part in 0..PARTS {
                let start = simd.splat_i32(starts[part][r]);
                let mut integers = [start; PANELS];
                unroll!(p in 0..PANELS { integers[p] = simd.add_i32(simd.load_i32(&computed[part][p][r]), start) });
                let scale = f32::from_bits(scales[r].cast_unsigned());
                add_scaled(simd, &mut sums, &integers, &self.factors[part], scale);
            }
            if let Some(offsets) = &self.offsets {
                for part in 0..PARTS {
                    let sum_of_x = simd.splat(f32::from_bits(sums_of_x[part][r].cast_unsigned()));
                    unroll!(p in 0..PANELS { sums[p] = simd.mul_add(offsets[part][p], sum_of_x, sums[p]) });
                }
            }
            store_row(simd, &sums, saved);
        }
    }
}

/// Returns N rows of a tile from row `first` on.
#[inline(always)]
fn rows_from<T, const N: usize>(rows: &[T; LANES], first: usize) -> &[T; N] {
    rows[first..].first_chunk().expect("rows of a tile")
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
