//! Products of many rows with a matrix unit.
//!
//! The unit computes the sums of a block of inputs, and vectors add them to the outputs as the register tiles do: with the
//! same operations in the same order. As all sums are exact, all bits are the same.
//!
//! Two tiles of rows are multiplied with two panels at a time, so that each tile that the unit loads is used twice. While
//! the unit computes, vectors add the sums that it computed before.
//!
//! Formats whose groups have factors are multiplied without the unit: their sums are of 16 or 32 products, and adding them
//! takes longer than the products. q4_k was not faster (`benches/record/2026-11-29-intel-amx/matmul-amx.txt`).

use std::marker::PhantomData;

use super::activations::{BlockOfRows, BlockOnUnit};
use super::panels::{Multiplier, Panels, Pass, Weights, write};
use super::tile::{MAX_TILE_PANELS, add_scaled, load_row, store_row};
use super::unroll::unroll;
use crate::arch::{ByteLine, Dot, DotKernel, LANES, LINE, MatrixKernel, MatrixUnit, TileSums, Tiles};
use crate::quant::integer::{BLOCK_PAIRS, Unpack, pairs};

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
    fn run<S: Dot>(mut self, simd: S) {
        const { assert!(S::WEIGHT_BIAS == M::WEIGHT_BIAS && !S::BY_CODES, "both multiply the same bytes") }
        const { assert!(R == LANES && P.is_multiple_of(PANELS), "tiles have sixteen rows") }
        // SAFETY: these are the only tiles of this thread: kernels with a unit do not run each other.
        let mut tiles = unsafe { self.unit.configure() };
        if self.pass.blocks.start == 0 {
            self.pass.sums.fill([[[0.0; LANES]; P]; R]);
        }
        let mut computed = [Computed([[[[0; LANES]; LANES]; PANELS]; TILES]); 2];
        let count = self.pass.sums.len();
        for first in (0..count - count % TILES).step_by(TILES) {
            self.add_tiles(simd, &mut tiles, first, &mut computed);
        }
        if !count.is_multiple_of(TILES) {
            let mut computed = [Computed([[[[0; LANES]; LANES]; PANELS]; 1]); 2];
            self.add_tiles(simd, &mut tiles, count - 1, &mut computed);
        }
    }
}

/// Sums that the unit computes at a time, `[tile][panel][row][column]`.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Computed<const T: usize>([[TileSums; PANELS]; T]);

impl<M, U: Unpack, const R: usize, const P: usize> UnitTiles<'_, '_, M, U, R, P> {
    /// Adds the products of T tiles of rows, from tile `tile` of the task on, to their sums.
    #[inline(always)]
    fn add_tiles<S: Dot, X: Tiles, const T: usize>(
        &mut self,
        simd: S,
        tiles: &mut X,
        tile: usize,
        computed: &mut [Computed<T>; 2],
    ) {
        let Pass { x, cols, first_tile, next_weights, next_lines, .. } = self.pass;
        let blocks = self.pass.blocks.clone();
        let mut inputs = [&[][..]; T];
        for (t, inputs) in inputs.iter_mut().enumerate() {
            *inputs = &x.tile(first_tile + tile + t)[blocks.clone()];
        }
        let (steps, lines_each) = (blocks.len() * (P / PANELS), (T * next_lines).div_ceil(blocks.len()));
        for step in 0..=steps {
            let [even, odd] = &mut *computed;
            let (to, before) = if step % 2 == 0 { (even, &*odd) } else { (odd, &*even) };
            let before = (step > 0).then(|| self.computed(simd, &inputs, At::new(step - 1), before));
            if step == steps {
                if let Some(before) = before {
                    for row in (0..T * LANES).step_by(LANES) {
                        before.add::<R, LANES>(simd, &mut self.pass.sums[tile..], row);
                    }
                }
                break;
            }
            let at = At::<P>::new(step);
            let next = tile * next_lines + at.block * lines_each;
            for weights in &next_weights[at.panel..][..PANELS] {
                for line in next..(next + lines_each).min((tile + T) * next_lines) {
                    simd.prefetch(weights.wrapping_add(line).cast());
                }
            }
            // Outputs are rarely in the cache: without this, their first writes stall.
            if let Some((out, columns)) = &mut self.pass.out {
                let each = (T * LANES).div_ceil(steps);
                let next = (tile + T) * LANES + step * each;
                for row in next..out.rows().len().min(next + each) {
                    for line in out.row(row)[columns.clone()].chunks(LANES) {
                        simd.prefetch(line.as_ptr().cast());
                    }
                }
            }
            if pairs(cols, blocks.start + at.block) < BLOCK_PAIRS {
                self.compute::<S, X, T, 1, LANES>(simd, tiles, &inputs, (tile, at), to, before);
            } else {
                self.compute::<S, X, T, 2, { LANES / 2 }>(simd, tiles, &inputs, (tile, at), to, before);
            }
        }
        if let Some((out, columns)) = &mut self.pass.out {
            for (tile, sums) in (tile..tile + T).zip(&self.pass.sums[tile..]) {
                write(sums, out, tile * R, columns);
            }
        }
    }

    /// Computes the sums of a block with the unit, HALVES half blocks one after the other. Between its instructions, vectors
    /// add the sums that it computed before, ROWS rows with each tile of rows and half block.
    #[inline(always)]
    fn compute<S: Dot, X: Tiles, const T: usize, const HALVES: usize, const ROWS: usize>(
        &mut self,
        simd: S,
        tiles: &mut X,
        inputs: &[&[BlockOfRows<LANES>]; T],
        (tile, at): (usize, At<P>),
        Computed(computed): &mut Computed<T>,
        before: Option<ComputedSums<'_, S, P, T>>,
    ) {
        let block = self.pass.blocks.start + at.block;
        let mut w = [&[][..]; PANELS];
        for (w, lines) in w.iter_mut().zip(&self.lines[at.panel..]) {
            *w = U::quad_lines(U::block(lines, block - self.first_block));
        }
        let mut x = [&[[[0; LINE]; LANES]; 2]; T];
        for (x, blocks) in x.iter_mut().zip(inputs) {
            *x = BlockOnUnit::new(&blocks[at.block]).tiles;
        }
        tiles.clear::<0>();
        if const { T > 1 } {
            tiles.clear::<1>();
        }
        for half in 0..HALVES {
            let (x, w) = (x.map(|x| &x[half]), w.map(|w| &w.as_chunks().0[half]));
            tiles.load(w);
            unroll!(t in 0..T {
                if const { T > 1 } && t == 1 {
                    tiles.add::<1>(x[t]);
                    if half + 1 == HALVES {
                        tiles.store::<0>(&mut computed[0]);
                    }
                } else {
                    tiles.add::<0>(x[t]);
                }
                if let Some(before) = &before {
                    before.add::<R, ROWS>(simd, &mut self.pass.sums[tile..], (half * T + t) * ROWS);
                }
            });
        }
        if const { T > 1 } {
            tiles.store::<1>(&mut computed[T - 1]);
        } else {
            tiles.store::<0>(&mut computed[0]);
        }
    }

    /// Returns computed sums with what they are multiplied with.
    #[inline(always)]
    fn computed<'c, S: Dot, const T: usize>(
        &self,
        simd: S,
        inputs: &[&'c [BlockOfRows<LANES>]; T],
        At { block, panel }: At<P>,
        Computed(sums): &'c Computed<T>,
    ) -> ComputedSums<'c, S, P, T> {
        let mut factors = [simd.splat(0.0); PANELS];
        for (p, factor) in factors.iter_mut().enumerate() {
            let index = self.pass.blocks.start + block;
            let of_panel = U::block(self.lines[panel + p], index - self.first_block);
            *factor = U::block_scale(simd, self.pass.block_scales[panel + p], index, of_panel);
        }
        let (mut scales, mut starts) = ([&[0; LANES]; T], [&[0; LANES]; T]);
        for t in 0..T {
            let of_block = BlockOnUnit::new(&inputs[t][block]);
            (scales[t], starts[t]) = (of_block.scales, of_block.starts);
        }
        ComputedSums { sums, factors, scales, starts, panel }
    }
}

/// Sums that the unit computed of a block, and what they are multiplied with.
struct ComputedSums<'c, S: Dot, const P: usize, const T: usize> {
    sums: &'c [[TileSums; PANELS]; T],
    factors: [S::F32; PANELS],
    /// Scales of the activations, and initial values of their sums.
    scales: [&'c [i32; LANES]; T],
    starts: [&'c [i32; LANES]; T],
    /// First of the panels.
    panel: usize,
}

impl<S: Dot, const P: usize, const T: usize> ComputedSums<'_, S, P, T> {
    /// Adds ROWS rows from row `first` on, all of one tile, to the sums of their tiles:
    /// `sums += computed * (factor * scale)`.
    #[inline(always)]
    fn add<const R: usize, const ROWS: usize>(&self, simd: S, to: &mut [[[[f32; LANES]; P]; R]], first: usize) {
        let (t, first) = (first / LANES, first % LANES);
        let to: &mut [_; ROWS] = to[t][first..].first_chunk_mut().expect("rows of a tile");
        let [scales, starts] = [self.scales[t], self.starts[t]].map(|words| rows_from::<_, ROWS>(words, first));
        let computed: [&[_; ROWS]; PANELS] = self.sums[t].each_ref().map(|sums| rows_from(sums, first));
        for r in 0..ROWS {
            let saved = to[r][self.panel..].first_chunk_mut().expect("a pair of panels");
            let mut sums = [simd.splat(0.0); PANELS];
            load_row(simd, saved, &mut sums);
            let start = simd.splat_i32(starts[r]);
            let mut integers = [start; PANELS];
            unroll!(p in 0..PANELS { integers[p] = simd.add_i32(simd.load_i32(&computed[p][r]), start) });
            add_scaled(simd, &mut sums, &integers, &self.factors, f32::from_bits(scales[r].cast_unsigned()));
            store_row(simd, &sums, saved);
        }
    }
}

/// Returns N rows of a tile from row `first` on.
#[inline(always)]
fn rows_from<T, const N: usize>(rows: &[T; LANES], first: usize) -> &[T; N] {
    rows[first..].first_chunk().expect("rows of a tile")
}

/// Place of the sums that the unit computes in one step.
#[derive(Clone, Copy)]
struct At<const P: usize> {
    /// Index of the block among those of the pass.
    block: usize,
    /// First of its panels.
    panel: usize,
}

impl<const P: usize> At<P> {
    /// Returns the place of step `step`.
    #[inline(always)]
    fn new(step: usize) -> Self {
        Self { block: step / (P / PANELS), panel: step % (P / PANELS) * PANELS }
    }
}
