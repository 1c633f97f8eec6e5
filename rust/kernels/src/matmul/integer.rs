//! The matmul of integer formats: bytes times bytes, added up exactly in blocks of 128 inputs.
//!
//! An output is one chain of multiply-adds over the blocks of its row, from the first to the last, beginning at zero:
//! `sum = integer * (step * scale) + sum`. What is behind an `integer` is exact, so the ways to get there may differ,
//! and do:
//!
//! - Few rows read each weight once, from memory, and unpack it in registers: panels are streams of memory, each with
//!   its software prefetch, and all rows use what was unpacked.
//! - Many rows unpack a block of weights once into the cache, and go over it one register tile after the other.
//! - Without an instruction that adds products of bytes up in 32 bits, codes are multiplied as they are, for any number
//!   of rows, in partial sums of 16 bits, which sub-scales then multiply.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use super::activations::{Activations, Input};
use super::tile::{Ahead, MAX_TILE_PANELS, Micro, UNPACKED_BLOCKS};
use super::unroll::unroll;
use super::{Product, Shares, to_multiply};
use crate::arch::{ByteLine, Kernel, LANES, LINE, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::matrix::{Band, PackedMatrix};
use crate::memory::Scratch;
use crate::quant::integer::{BLOCK, BLOCK_PAIRS, BLOCK_QUADS, PAIR_QUADS, SUPER, Steps, Unpack, Unpacked, blocks};
use crate::quant::{FloatFormat, FormatVisitor, IntegerFormat};
use crate::{Exec, PoolError};

/// The most panels that are worked on side by side. Reading four streams at once is much faster than one.
const MAX_STREAMS: usize = 4;

/// Lines of that many blocks of one panel.
const UNPACKED_LINES: usize = UNPACKED_BLOCKS * BLOCK_QUADS;

/// How many tasks a thread gets, unless they would be larger than tasks may be or smaller than kernels like: the last ones
/// should be short, and following each other in memory they cost little.
const TASKS_A_THREAD: usize = 16;

/// The most panels of a task: bounds its time, so that cancelling stays quick.
const MAX_TASK_PANELS: usize = 16;

/// The most rows of a task, for the same reason: a usual chunk of 512, in whole tiles of 2, 4 or 6.
const MAX_TASK_ROWS: usize = 516;

thread_local! {
    /// Quantized activations of the calls that this thread makes, kept from call to call.
    static QUANTIZED: RefCell<Scratch<i32>> = RefCell::default();
}

/// Multiplies with weights whose bands are all in integer formats.
pub(super) fn multiply(exec: &Exec<'_>, products: &mut [Product<'_>]) -> Result<(), PoolError> {
    let mut buffer = QUANTIZED.take();
    let result = multiply_in(exec, products, &mut buffer);
    QUANTIZED.set(buffer);
    result
}

fn multiply_in(exec: &Exec<'_>, products: &mut [Product<'_>], buffer: &mut Scratch<i32>) -> Result<(), PoolError> {
    let shares = Shares::new(products, TASKS_A_THREAD * exec.pool.threads());
    let mut inputs: Vec<Input<'_>> = Vec::with_capacity(products.len());
    let plan = to_multiply(products).map(|product| {
        let (m, n) = (product.m(), product.w.rows());
        let (rows, by_codes) = exec.isa.run(TileRows { m });
        let input = Input { x: product.x, k: product.w.cols(), tile_rows: rows.of_tile(), by_codes };
        let known = inputs.iter().position(|other| other.is_same(&input));
        let input = known.unwrap_or_else(|| {
            inputs.push(input);
            inputs.len() - 1
        });
        let task_rows = m.min(MAX_TASK_ROWS / rows.of_tile() * rows.of_tile());
        let task_panels = shares.panels(product, MAX_STREAMS, MAX_TASK_PANELS);
        let tiles = Tiles::new(product.out, n, 0..n, task_rows, task_panels * LANES);
        Plan { w: product.w, input, rows, tiles }
    });
    let plans: Vec<_> = plan.collect();
    let inputs = Activations::quantize_each(exec, &inputs, buffer)?;
    exec.run_each(plans.iter().map(|plan| plan.tiles.len()), |product, task| {
        let Plan { w, input, rows, tiles } = &plans[product];
        // Tasks that follow each other share their weights.
        let mut out = tiles.take_down(task);
        let panels = out.columns().start / LANES..out.columns().end.div_ceil(LANES);
        for band in w.bands() {
            let panels = panels.start.max(band.panels.start)..panels.end.min(band.panels.end);
            if !panels.is_empty() {
                let (x, k, rows, out) = (&inputs[*input], w.cols(), *rows, &mut out);
                band.format.visit(Visit { exec, x, k, band, panels, rows, out });
            }
        }
    })
}

/// How a product is cut into tasks.
struct Plan<'a> {
    w: &'a PackedMatrix,
    /// The number of its activations, which other products may share.
    input: usize,
    rows: Rows,
    tiles: Tiles<'a, f32>,
}

/// How rows are cut into tiles.
#[derive(Clone, Copy)]
enum Rows {
    /// All rows are one tile.
    Few(usize),
    /// There are tiles of so many rows.
    Many(usize),
}

impl Rows {
    fn of_tile(self) -> usize {
        match self {
            Self::Few(rows) | Self::Many(rows) => rows,
        }
    }
}

/// Tiles of few rows that there are kernels for; what lies between is filled up with rows of zeros.
const FEW_ROWS: [usize; 7] = [1, 2, 4, 6, 8, 12, 16];

/// The most rows that are multiplied with weights as they come from memory: those whose accumulators fit the registers.
const fn few_rows<S: Simd>() -> usize {
    let accumulators = S::BYTE_TILE_ROWS * S::BYTE_TILE_PANELS;
    if accumulators < FEW_ROWS[FEW_ROWS.len() - 1] { S::BYTE_TILE_ROWS } else { FEW_ROWS[FEW_ROWS.len() - 1] }
}

/// Asks an instruction set for the tiles of `m` rows, and whether codes are multiplied in them.
struct TileRows {
    m: usize,
}

impl Kernel for TileRows {
    type Output = (Rows, bool);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (Rows, bool) {
        let few = FEW_ROWS.into_iter().filter(|rows| *rows <= few_rows::<S>()).find(|rows| self.m <= *rows);
        let rows = few.map_or(Rows::Many(S::BYTE_TILE_ROWS), Rows::Few);
        (rows, S::BY_CODES)
    }
}

/// Multiplies panels of one band.
struct Visit<'a, 'o> {
    exec: &'a Exec<'a>,
    x: &'a Activations<'a>,
    k: usize,
    band: &'a Band,
    /// Panels of the matrix.
    panels: Range<usize>,
    rows: Rows,
    out: &'a mut Tile<'o, f32>,
}

impl FormatVisitor for Visit<'_, '_> {
    type Output = ();

    fn float<F: FloatFormat>(self) {
        unreachable!("the matrix has integer formats");
    }

    fn integer<F: IntegerFormat>(self) {
        let Self { exec, x, k, band, panels, rows, out } = self;
        let first_column = out.columns().start;
        exec.isa.run(Panels::<F> {
            x,
            blocks: blocks(k),
            steps: band.steps(panels.start),
            lines: band.byte_lines(panels.start),
            panel_lines: F::lines(blocks(k)),
            column: panels.start * LANES - first_column,
            end: (panels.end * LANES - first_column).min(out.columns().len()),
            rows,
            out,
            format: PhantomData,
        });
    }
}

/// Panels of one format, times the rows of a task.
struct Panels<'a, 'o, F> {
    x: &'a Activations<'a>,
    blocks: usize,
    /// Steps and lines of the panels, and what follows them in the band.
    steps: &'a [Steps],
    lines: &'a [ByteLine],
    panel_lines: usize,
    /// The columns of `out` that the panels are.
    column: usize,
    end: usize,
    rows: Rows,
    out: &'a mut Tile<'o, f32>,
    format: PhantomData<F>,
}

impl<F: IntegerFormat> Kernel for Panels<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        macro_rules! few {
            ($rows:expr, $($n:literal)*) => {
                match $rows {
                    $($n => if const { $n <= few_rows::<S>() } { self.few::<S, $n>(simd) })*
                    rows => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        match self.rows {
            Rows::Few(rows) => few!(rows, 1 2 4 6 8 12 16),
            Rows::Many(_) => {
                macro_rules! many {
                    ($($r:literal x $p:literal)*) => {
                        $(if const { $r == S::BYTE_TILE_ROWS && $p == S::BYTE_TILE_PANELS } {
                            self.many::<S, $r, $p>(simd);
                        })*
                    };
                }
                many!(2 x 1  4 x 1  6 x 1  6 x 4);
            }
        }
    }
}

/// How many panels are worked on side by side for a number of rows: what fits the registers.
const fn streams<S: Simd>(rows: usize) -> usize {
    let mut streams = MAX_STREAMS;
    while streams > 1 && streams * rows > S::BYTE_TILE_ROWS * S::BYTE_TILE_PANELS {
        streams /= 2;
    }
    streams
}

impl<'a, F: IntegerFormat> Panels<'a, '_, F> {
    /// Steps and lines of P panels from number `first` on.
    #[inline(always)]
    fn panels<const P: usize>(&self, first: usize) -> ([&'a [Steps]; P], [&'a [ByteLine]; P]) {
        let supers = self.blocks.div_ceil(SUPER / BLOCK);
        let (mut steps, mut lines) = ([self.steps; P], [self.lines; P]);
        for p in 0..P {
            steps[p] = &self.steps[(first + p) * supers..][..supers];
            lines[p] = &self.lines[(first + p) * self.panel_lines..];
        }
        (steps, lines)
    }

    /// One tile of rows, with weights as they come from memory.
    #[inline(always)]
    fn few<S: Simd, const R: usize>(&mut self, simd: S) {
        let side_by_side = streams::<S>(R);
        let groups = (self.end - self.column) / (side_by_side * LANES);
        match const { streams::<S>(R) } {
            4 => simd.vectorize(Streams::<_, R, 4> { of: self, first: 0, groups }),
            2 => simd.vectorize(Streams::<_, R, 2> { of: self, first: 0, groups }),
            _ => simd.vectorize(Streams::<_, R, 1> { of: self, first: 0, groups }),
        }
        let rest = (self.end - self.column).div_ceil(LANES);
        simd.vectorize(Streams::<_, R, 1> { of: self, first: groups * side_by_side, groups: rest });
    }

    /// Any number of tiles of rows, with weights that are unpacked once for all of them.
    #[inline(always)]
    fn many<S: Simd, const R: usize, const P: usize>(&mut self, simd: S) {
        let mut room = [ByteLine([0; LINE]); MAX_TILE_PANELS * UNPACKED_LINES];
        let mut sums = [[0.0; LANES]; MAX_TASK_ROWS * MAX_TILE_PANELS];
        let mut panel = 0;
        while self.column + P * LANES <= self.end {
            self.row_tiles::<S, R, P>(simd, panel, &mut room, &mut sums);
            panel += P;
        }
        while self.column < self.end {
            self.row_tiles::<S, R, 1>(simd, panel, &mut room, &mut sums);
            panel += 1;
        }
    }

    /// P panels from number `panel` on, times all rows of the task. Sums pause in `sums`, close together: rows of the
    /// output are often a power of two apart and would push each other out of the cache.
    #[inline(always)]
    fn row_tiles<S: Simd, const R: usize, const P: usize>(
        &mut self,
        simd: S,
        panel: usize,
        room: &mut [ByteLine],
        sums: &mut [[f32; LANES]],
    ) {
        let (steps, lines) = self.panels::<P>(panel);
        let tiles = self.out.rows().len().div_ceil(R);
        let sums = &mut sums.as_chunks_mut::<P>().0.as_chunks_mut::<R>().0[..tiles];
        let columns = self.column..self.end.min(self.column + P * LANES);
        let (x, first_tile) = (self.x, self.out.rows().start / R);
        for first in (0..self.blocks).step_by(UNPACKED_BLOCKS) {
            let blocks = first..self.blocks.min(first + UNPACKED_BLOCKS);
            let last = blocks.end == self.blocks;
            let next_line = if last { P * self.panel_lines } else { F::first_line(blocks.end) };
            let next_weights = lines.map(|lines| lines.as_ptr().wrapping_add(next_line));
            let next_lines = F::first_line(UNPACKED_BLOCKS).div_ceil(tiles);
            let out = last.then_some((&mut *self.out, columns.clone()));
            let unpack = const { F::BY_CODES.is_some() && !S::BY_CODES };
            if unpack {
                for (lines, to) in lines.iter().zip(room.chunks_exact_mut(UNPACKED_LINES)) {
                    simd.vectorize(UnpackBlocks::<F> { lines, blocks: blocks.clone(), to, format: PhantomData });
                }
            }
            let pass = Pass { x, first_tile, blocks, steps, next_weights, next_lines, sums, out };
            if unpack {
                let lines = std::array::from_fn(|p| &room[p * UNPACKED_LINES..][..UNPACKED_LINES]);
                simd.vectorize(RowTiles { pass, lines, first_block: first, format: PhantomData::<Unpacked> });
            } else {
                simd.vectorize(RowTiles { pass, lines, first_block: 0, format: PhantomData::<F> });
            }
        }
        self.column = columns.end;
    }
}

/// One tile of R rows, times groups of P panels that are read side by side.
struct Streams<'s, 'a, 'o, F, const R: usize, const P: usize> {
    of: &'s mut Panels<'a, 'o, F>,
    /// The first panel.
    first: usize,
    groups: usize,
}

impl<F: IntegerFormat, const R: usize, const P: usize> Kernel for Streams<'_, '_, '_, F, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { of, first, groups } = self;
        let x = of.x.tile::<R>(0);
        let starts = if S::BY_CODES { of.x.starts(0) } else { &[] };
        let mut sums = [[[0.0; LANES]; P]; R];
        for group in 0..groups {
            let (steps, lines) = of.panels::<P>(first + group * P);
            // The steps of the panels that come next: too few for the processor to see a stream in them.
            let bytes = P * size_of_val(steps[0]);
            for byte in (bytes..2 * bytes).step_by(LINE) {
                simd.prefetch(steps[0].as_ptr().cast::<u8>().wrapping_add(byte));
            }
            let ahead = Ahead::Weights { end: of.panel_lines, skip: (P - 1) * of.panel_lines };
            let (blocks, first_block, format) = (0..of.blocks, 0, PhantomData::<F>);
            Micro { x, starts, blocks, steps, lines, first_block, ahead, sums: &mut sums, format }.run(simd);
            let columns = of.column..of.end.min(of.column + P * LANES);
            write(&sums, of.out, 0, &columns);
            of.column = columns.end;
        }
    }
}

/// Some blocks of P panels, times all tiles of a task.
struct RowTiles<'a, 'o, U, const R: usize, const P: usize> {
    pass: Pass<'a, 'o, R, P>,
    lines: [&'a [ByteLine]; P],
    /// The block at the beginning of `lines`.
    first_block: usize,
    format: PhantomData<U>,
}

/// What [`RowTiles`] has to do, however the weights are stored.
struct Pass<'a, 'o, const R: usize, const P: usize> {
    x: &'a Activations<'a>,
    first_tile: usize,
    blocks: Range<usize>,
    steps: [&'a [Steps]; P],
    /// The weights that come next, and how many lines of each panel a tile asks for.
    next_weights: [*const ByteLine; P],
    next_lines: usize,
    sums: &'a mut [[[[f32; LANES]; P]; R]],
    /// After the last block, the columns that the sums are.
    out: Option<(&'a mut Tile<'o, f32>, Range<usize>)>,
}

impl<U: Unpack, const R: usize, const P: usize> Kernel for RowTiles<'_, '_, U, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { pass, lines, first_block, .. } = self;
        let Pass { x, first_tile, blocks, steps, next_weights, next_lines, sums, mut out } = pass;
        let tile_of = |tile: usize| &x.tile::<R>(first_tile + tile)[blocks.clone()];
        for tile in 0..sums.len() {
            for line in tile * next_lines..(tile + 1) * next_lines {
                for weights in next_weights {
                    simd.prefetch(weights.wrapping_add(line).cast());
                }
            }
            let mut ahead = Ahead::Tile { blocks: &[], first: blocks.start, rows: [None; 2] };
            if tile + 1 < sums.len() {
                let next_sums = sums[tile + 1].each_ref().map(|row| row.as_flattened().as_ptr());
                let outputs = out.as_mut().map(|(out, columns)| {
                    let last = out.rows().len() - 1;
                    std::array::from_fn(|row| out.row(last.min((tile + 1) * R + row))[columns.clone()].as_ptr())
                });
                let rows = [Some(next_sums), outputs];
                ahead = Ahead::Tile { blocks: tile_of(tile + 1), first: blocks.start, rows };
            }
            let (tile_x, blocks, format) = (tile_of(tile), blocks.clone(), PhantomData::<U>);
            let starts = if S::BY_CODES { &x.starts(first_tile + tile)[blocks.clone()] } else { &[][..] };
            let sums = &mut sums[tile];
            Micro { x: tile_x, starts, blocks, steps, lines, first_block, ahead, sums, format }.run(simd);
            if let Some((out, columns)) = &mut out {
                write(sums, out, tile * R, columns);
            }
        }
    }
}

/// Writes the sums of a tile whose first row is row `first` of the task, as far as there are such outputs.
#[inline(always)]
fn write<const R: usize, const P: usize>(
    sums: &[[[f32; LANES]; P]; R],
    out: &mut Tile<'_, f32>,
    first: usize,
    columns: &Range<usize>,
) {
    let rows = first..out.rows().len().min(first + R);
    for (row, sums) in rows.zip(sums) {
        let out = &mut out.row(row)[columns.clone()];
        match <&mut [[f32; LANES]; P]>::try_from(out.as_chunks_mut().0) {
            Ok(whole) => *whole = *sums,
            Err(_) => out.copy_from_slice(&sums.as_flattened()[..out.len()]),
        }
    }
}

/// Unpacks some blocks of a panel.
struct UnpackBlocks<'a, F> {
    /// The panel's blocks.
    lines: &'a [ByteLine],
    blocks: Range<usize>,
    to: &'a mut [ByteLine],
    format: PhantomData<F>,
}

impl<F: IntegerFormat> Kernel for UnpackBlocks<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let pairs = self.blocks.flat_map(|block| (0..BLOCK_PAIRS).map(move |pair| (block, pair)));
        for ((block, pair), to) in pairs.zip(self.to.as_chunks_mut::<PAIR_QUADS>().0) {
            let pair = F::pair(simd, F::block(self.lines, block), pair);
            unroll!(q in [0 1 2 3 4 5 6 7] { simd.store_bytes(F::quad(simd, pair, q), &mut to[q].0) });
        }
    }
}
