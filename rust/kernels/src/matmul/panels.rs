//! Loops over panels of bytes and tiles of rows, for all weight formats.
//!
//! Few rows form one tile, in which all rows use each load of the weights. Many rows are partitioned into tiles, which use
//! unpacked blocks of weights one after the other.
//!
//! Kernels compute a fixed number of panels. Where fewer are left, the last panel takes the place of the missing ones and
//! their results are dropped: kernels for each smaller number would double what has to be compiled.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::slice;

use super::activations::{Activations, Basis};
use super::prefetch::{Next, Streams};
use super::tile::{MAX_TILE_PANELS, Micro, TileInput, UNPACKED_BLOCKS};
use super::tile::{codes, in_order, in_turn, multiplies_codes};
use crate::arch::{ByteLine, Dot, DotKernel, LANES, LINE};
use crate::disjoint::Tile;
use crate::memory::Scratch;
use crate::quant::grouped::MAX_UNPACKED_BLOCK_LINES;
use crate::quant::integer::{BLOCK_PAIRS, BlockScales, Unpack};

/// Maximum number of panels that are read side by side. Where one stream is not the fastest, four are much faster.
pub(super) const MAX_STREAMS: usize = 4;

/// Maximum number of lines that are unpacked of a panel.
const MAX_UNPACKED_LINES: usize = UNPACKED_BLOCKS * MAX_UNPACKED_BLOCK_LINES;

/// Number of blocks that are unpacked at a time for few rows.
const FEW_BLOCKS: usize = 1;

/// Maximum number of sums of few rows: that of the largest register tile.
const MAX_FEW_SUMS: usize = 24;

/// Maximum number of rows of a task, which bounds its time: a usual chunk of 512, in whole tiles of 1, 4 or 6.
pub(super) const MAX_TASK_ROWS: usize = 516;

thread_local! {
    /// Sums and unpacked lines of the tasks of this thread that have many rows: too large to be cleared for each task.
    static BUFFERS: RefCell<(Scratch<[f32; LANES]>, Scratch<ByteLine>)> = RefCell::default();
}

/// Weights of one format, as the matmul reads them.
pub(super) trait Weights: Sized + 'static {
    /// Number of blocks of a panel that are unpacked at a time for many rows.
    const BLOCKS: usize;
    /// Number of lines of one unpacked block.
    const BLOCK_LINES: usize;
    /// Whether groups of weights have factors.
    const HAS_FACTORS: bool;

    /// Returns the index of the first line of block `index` of a panel.
    fn first_line(index: usize) -> usize;

    /// Multiplies all panels with one tile of R rows.
    fn few_rows<S: Dot, const R: usize>(panels: &mut Panels<'_, '_, Self>, simd: S);

    /// Multiplies some blocks of P panels with all tiles of a task. `unpacked_lines` is a buffer for `BLOCKS` unpacked
    /// blocks of each panel.
    fn multiply<S: Dot, X: Multiplier, const R: usize, const P: usize>(
        simd: S,
        multiplier: X,
        pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        unpacked_lines: &mut [ByteLine],
    );
}

/// Weights that are unpacked a block at a time into the L1 cache.
pub(super) trait UnpackedWeights: Weights {
    /// Unpacked form.
    type Unpacked: Unpack;
    /// Unpacked form on instruction sets that multiply codes.
    type ByCodes: Unpack;

    /// Unpacks some blocks of a panel over `cols` inputs, given its lines.
    fn unpack<S: Dot>(simd: S, lines: &[ByteLine], cols: usize, blocks: Range<usize>, to: &mut [ByteLine]);
}

/// Unpacks some blocks of P panels and multiplies them with all tiles of a task; see [`Weights::multiply`].
#[inline(always)]
pub(super) fn multiply_unpacked<W: UnpackedWeights, S: Dot, X: Multiplier, const R: usize, const P: usize>(
    simd: S,
    multiplier: X,
    pass: Pass<'_, '_, R, P>,
    lines: [&[ByteLine]; P],
    unpacked_lines: &mut [ByteLine],
) {
    let (blocks, mut unpacked) = (pass.blocks.clone(), [&[][..]; P]);
    for (p, to) in unpacked_lines.chunks_exact_mut(blocks.len() * W::BLOCK_LINES).take(P).enumerate() {
        W::unpack(simd, lines[p], pass.cols, blocks.clone(), &mut *to);
        unpacked[p] = to;
    }
    if const { S::BY_CODES } {
        multiplier.multiply::<S, W::ByCodes, R, P>(simd, pass, unpacked, blocks.start);
    } else {
        multiplier.multiply::<S, W::Unpacked, R, P>(simd, pass, unpacked, blocks.start);
    }
}

/// Way to multiply tiles of many rows with blocks of weights: with vectors or a matrix unit.
pub(super) trait Multiplier: Copy {
    /// Multiplies P panels with all tiles of a task, of R rows each. `first_block` is the index of the block at the
    /// beginning of `lines`.
    fn multiply<S: Dot, U: Unpack, const R: usize, const P: usize>(
        self,
        simd: S,
        pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        first_block: usize,
    );
}

/// Register tiles of vectors.
#[derive(Clone, Copy)]
pub(super) struct Vectors;

impl Multiplier for Vectors {
    #[inline(always)]
    fn multiply<S: Dot, U: Unpack, const R: usize, const P: usize>(
        self,
        simd: S,
        pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        first_block: usize,
    ) {
        simd.vectorize_dot(RowTiles { pass, lines, first_block, format: PhantomData::<U> });
    }
}

/// Partition of rows into tiles.
#[derive(Clone, Copy)]
pub(super) enum Rows {
    /// All rows are one tile.
    Few(usize),
    /// Rows are partitioned into tiles of this many rows.
    Many(usize),
    /// Rows are partitioned into the tiles of a matrix unit.
    OnUnit,
}

impl Rows {
    /// Returns the number of rows of a tile.
    pub fn tile_rows(self) -> usize {
        match self {
            Self::Few(rows) | Self::Many(rows) => rows,
            Self::OnUnit => LANES,
        }
    }
}

/// Numbers of rows with a specialized kernel; other numbers are padded with rows of zeros.
const FEW_ROWS: [usize; 7] = [1, 2, 4, 6, 8, 12, 16];

/// Returns the largest number of rows that are one tile: that whose accumulators fit the registers. A matrix unit is not
/// used for them: it is hardly faster with 17 rows (`benches/record/2026-11-29-intel-amx/matmul-amx.txt`).
const fn few_rows<S: Dot>() -> usize {
    let accumulators = S::BYTE_TILE_ROWS * S::BYTE_TILE_PANELS;
    if accumulators < FEW_ROWS[FEW_ROWS.len() - 1] { S::BYTE_TILE_ROWS } else { FEW_ROWS[FEW_ROWS.len() - 1] }
}

/// Kernel that returns the tiles of `m` rows, and whether codes are multiplied, by basis.
pub(super) struct TileRows {
    pub m: usize,
    /// Whether a matrix unit multiplies many rows.
    pub has_unit: bool,
}

impl DotKernel for TileRows {
    type Output = (Rows, [bool; Basis::ALL.len()]);

    #[inline(always)]
    fn run<S: Dot>(self, _: S) -> Self::Output {
        let many = if self.has_unit { Rows::OnUnit } else { Rows::Many(S::BYTE_TILE_ROWS) };
        let few = FEW_ROWS.into_iter().filter(|rows| *rows <= few_rows::<S>()).find(|rows| self.m <= *rows);
        let rows = few.map_or(many, Rows::Few);
        let by_codes = |basis| match rows {
            Rows::Few(rows) => multiplies_codes::<S>(rows, basis == Basis::Plain),
            Rows::Many(_) | Rows::OnUnit => S::BY_CODES,
        };
        (rows, Basis::ALL.map(by_codes))
    }
}

/// Product of panels of one format with the rows of a task.
pub(super) struct Panels<'a, 'o, W> {
    pub x: &'a Activations<'a>,
    /// Number of inputs, and of blocks of inputs.
    pub cols: usize,
    pub blocks: usize,
    /// Block scales and lines of the panels, and of those that follow them in the band.
    pub block_scales: &'a [BlockScales],
    pub panel_scales: usize,
    pub lines: &'a [ByteLine],
    pub panel_lines: usize,
    /// Whether the weights probably are in the last-level cache.
    pub in_cache: bool,
    /// Whether panels are read one after the other where there are few rows and kernels for it ([`Dot::READS_ONE_STREAM`]).
    pub one_stream: bool,
    /// Columns of `out` that the panels compute: the first, and the one after the last.
    pub column: usize,
    pub end: usize,
    pub rows: Rows,
    pub out: &'a mut Tile<'o, f32>,
    pub weights: PhantomData<W>,
}

impl<W: Weights> DotKernel for Panels<'_, '_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(mut self, simd: S) {
        macro_rules! few {
            ($rows:expr, $($n:literal)*) => {
                match $rows {
                    $($n => if const { $n <= few_rows::<S>() } { W::few_rows::<S, $n>(&mut self, simd) })*
                    rows => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        match self.rows {
            Rows::Few(rows) => few!(rows, 1 2 4 6 8 12 16),
            Rows::Many(_) => {
                macro_rules! many {
                    ($($r:literal x $p:literal)*) => {
                        const {
                            let is_listed = false $(|| $r == S::BYTE_TILE_ROWS && $p == tile_panels::<S, W>())*;
                            assert!(is_listed, "no kernel for the tile of this instruction set");
                        }
                        $(if const { $r == S::BYTE_TILE_ROWS && $p == tile_panels::<S, W>() } {
                            self.many_rows::<S, Vectors, $r, $p>(simd, Vectors);
                        })*
                    };
                }
                many!(1 x 1  4 x 1  6 x 1  6 x 2  6 x 4);
            }
            Rows::OnUnit => unreachable!("tiles of a matrix unit"),
        }
    }
}

/// Returns the number of panels of a tile of many rows. Where groups have factors, the sums of a tile are read and written
/// after each group, and half as many panels are faster (`benches/record/2026-11-30-amd-epyc-zen5/matmul-factors.txt`).
const fn tile_panels<S: Dot, W: Weights>() -> usize {
    if W::HAS_FACTORS && S::BYTE_TILE_PANELS > 1 { S::BYTE_TILE_PANELS / 2 } else { S::BYTE_TILE_PANELS }
}

/// Returns the largest number of rows for which panels are read one after the other on machines that read one stream faster:
/// unpacking weights whose groups have factors, or that are expanded, takes too long for more.
const fn one_stream_rows<U: Unpack>() -> usize {
    if U::FACTORS.is_some() || U::EXPANDS { 2 } else { 6 }
}

/// Returns how many panels are read side by side for a number of rows: as many as fit the registers.
const fn streams<S: Dot>(rows: usize) -> usize {
    let mut streams = MAX_STREAMS;
    while streams > 1 && streams * rows > S::BYTE_TILE_ROWS * S::BYTE_TILE_PANELS {
        streams /= 2;
    }
    streams
}

/// Returns how many panels are read side by side if weights are unpacked in registers, which also hold sub-scales and
/// offsets: where the sums of four panels leave 8 of 32 registers, int4 takes a tenth less time with two
/// (`cargo bench --bench matmul -- int4 6`).
const fn unpacked_streams<S: Dot, U: Unpack>(rows: usize) -> usize {
    let streams = streams::<S>(rows);
    let has_sub_scales = U::BY_CODES.is_some() && U::FACTORS.is_none();
    if has_sub_scales && streams == MAX_STREAMS && streams * rows == MAX_FEW_SUMS { 2 } else { streams }
}

/// Runs a kernel with the instructions that unpack these weights.
#[inline(always)]
fn enter<S: Dot, U: Unpack, K: DotKernel>(simd: S, kernel: K) -> K::Output {
    if const { U::EXPANDS } { simd.vectorize_expand(kernel) } else { simd.vectorize_dot(kernel) }
}

// Functions that call kernels are compiled without the instructions of the kernels, and never inlined: inlined into each
// other they made up an eighth of all code.
impl<'a, W: Weights> Panels<'a, '_, W> {
    /// Returns the number of panels.
    #[inline(always)]
    pub fn count(&self) -> usize {
        (self.end - self.column).div_ceil(LANES)
    }

    /// Returns the block scales and lines of P panels from panel `first` on; past panel `last` those of panel `last`.
    #[inline(always)]
    pub fn panels<const P: usize>(&self, first: usize, last: usize) -> ([&'a [BlockScales]; P], [&'a [ByteLine]; P]) {
        let (mut block_scales, mut lines) = ([self.block_scales; P], [self.lines; P]);
        for p in 0..P {
            let panel = last.min(first + p);
            block_scales[p] = &self.block_scales[panel * self.panel_scales..][..self.panel_scales];
            lines[p] = &self.lines[panel * self.panel_lines..];
        }
        (block_scales, lines)
    }

    /// Multiplies all panels with one tile of R rows, and unpacks weights in registers.
    #[inline(always)]
    pub fn streams<S: Dot, U: Unpack, const R: usize>(&mut self, simd: S) {
        let format = PhantomData::<U>;
        if const { S::READS_ONE_STREAM && R <= one_stream_rows::<U>() } && self.one_stream {
            return enter::<S, U, _>(simd, SideBySide::<_, _, R, 1> { of: self, format });
        }
        match const { unpacked_streams::<S, U>(R) } {
            4 => enter::<S, U, _>(simd, SideBySide::<_, _, R, 4> { of: self, format }),
            2 => enter::<S, U, _>(simd, SideBySide::<_, _, R, 2> { of: self, format }),
            _ => enter::<S, U, _>(simd, SideBySide::<_, _, R, 1> { of: self, format }),
        }
    }

    /// Multiplies all panels with one tile of R rows, and unpacks weights a block at a time.
    #[inline(always)]
    pub fn few_row_tiles<S: Dot, const R: usize>(&mut self, simd: S) {
        let mut unpacked_lines = [ByteLine([0; LINE]); MAX_STREAMS * FEW_BLOCKS * MAX_UNPACKED_BLOCK_LINES];
        let mut sums = [[0.0; LANES]; MAX_FEW_SUMS];
        const { assert!(R * streams::<S>(R) <= MAX_FEW_SUMS) }
        match const { streams::<S>(R) } {
            4 => self.row_tiles::<S, _, R, 4>(simd, Vectors, FEW_BLOCKS, &mut unpacked_lines, &mut sums),
            2 => self.row_tiles::<S, _, R, 2>(simd, Vectors, FEW_BLOCKS, &mut unpacked_lines, &mut sums),
            _ => self.row_tiles::<S, _, R, 1>(simd, Vectors, FEW_BLOCKS, &mut unpacked_lines, &mut sums),
        }
    }

    /// Multiplies with any number of tiles of rows, and unpacks weights once for all of them.
    #[inline(never)]
    pub fn many_rows<S: Dot, X: Multiplier, const R: usize, const P: usize>(&mut self, simd: S, multiplier: X) {
        const { assert!(W::BLOCKS * W::BLOCK_LINES <= MAX_UNPACKED_LINES) }
        let (mut sums, mut unpacked_lines) = BUFFERS.take();
        let tiles = self.out.rows().len().div_ceil(R);
        let (of_tiles, lines) = (sums.take(tiles * R * P), unpacked_lines.take(P * MAX_UNPACKED_LINES));
        self.row_tiles::<S, X, R, P>(simd, multiplier, W::BLOCKS, lines, of_tiles);
        BUFFERS.set((sums, unpacked_lines));
    }

    /// Multiplies all panels, P at a time, with all rows of the task, `blocks_at_once` blocks at a time. Sums pause in
    /// `sums`, close together: rows of the output are often a power of two apart and would evict each other from the
    /// cache.
    #[inline(always)]
    pub fn row_tiles<S: Dot, X: Multiplier, const R: usize, const P: usize>(
        &mut self,
        simd: S,
        multiplier: X,
        blocks_at_once: usize,
        unpacked_lines: &mut [ByteLine],
        sums: &mut [[f32; LANES]],
    ) {
        let count = self.count();
        let tiles = self.out.rows().len().div_ceil(R);
        let sums = &mut sums.as_chunks_mut::<P>().0.as_chunks_mut::<R>().0[..tiles];
        let (x, cols, first_tile) = (self.x, self.cols, self.out.rows().start / R);
        for panel in (0..count).step_by(P) {
            let (block_scales, lines) = self.panels::<P>(panel, count - 1);
            let columns = self.column..self.end.min(self.column + P * LANES);
            for first in (0..self.blocks).step_by(blocks_at_once) {
                let blocks = first..self.blocks.min(first + blocks_at_once);
                // A single tile is done quickly: it prefetches not the next weights but those after them.
                let next = if tiles == 1 { blocks.end + blocks_at_once } else { blocks.end };
                let past = next.saturating_sub(self.blocks);
                let next_line =
                    if next < self.blocks { W::first_line(next) } else { P * self.panel_lines + W::first_line(past) };
                let mut next_weights = [lines[0].as_ptr(); P];
                for p in 0..P {
                    next_weights[p] = lines[p].as_ptr().wrapping_add(next_line);
                }
                let next_lines = W::first_line(blocks_at_once).div_ceil(tiles);
                let out = if blocks.end == self.blocks { Some((&mut *self.out, columns.clone())) } else { None };
                let pass = Pass { x, cols, first_tile, blocks, block_scales, next_weights, next_lines, sums, out };
                W::multiply(simd, multiplier, pass, lines, unpacked_lines);
            }
            self.column = columns.end;
        }
    }
}

/// Product of all panels, P at a time side by side, with one tile of R rows.
pub(super) struct SideBySide<'s, 'a, 'o, W, U, const R: usize, const P: usize> {
    pub of: &'s mut Panels<'a, 'o, W>,
    pub format: PhantomData<U>,
}

impl<W: Weights, U: Unpack, const R: usize, const P: usize> DotKernel for SideBySide<'_, '_, '_, W, U, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        let Self { of, .. } = self;
        let prefetch = &Streams::<P> { end: of.panel_lines, in_cache: of.in_cache };
        let (count, cols) = (of.count(), of.cols);
        let x = of.x.tile::<R>(0);
        let starts = if const { codes::<S, U>(R).is_some() } { of.x.starts(0) } else { &[] };
        let groups = if const { U::FACTORS.is_some() } { of.x.groups(0) } else { &[] };
        for first in (0..count).step_by(P) {
            let (block_scales, lines) = of.panels::<P>(first, count - 1);
            // The block scales of the next panels: too few for the hardware prefetcher to find the stream.
            let bytes = P * size_of_val(block_scales[0]);
            for byte in (bytes..2 * bytes).step_by(LINE) {
                simd.prefetch(block_scales[0].as_ptr().cast::<u8>().wrapping_add(byte));
            }
            if const { in_turn::<S, U>(R) } {
                let mut sums = [[[[0.0; LANES]; 1]; R]; P];
                for block in 0..of.blocks {
                    let starts = starts.get(block).map_or(&[][..], slice::from_ref);
                    let groups = groups.get(block).map_or(&[][..], slice::from_ref);
                    for p in 0..P {
                        let x = slice::from_ref(in_order(&x[block]));
                        let x = TileInput { x, starts, groups, blocks: block..block + 1, cols };
                        let (block_scales, lines, sums) = ([block_scales[p]], [lines[p]], &mut sums[p]);
                        let format = PhantomData::<U>;
                        Micro { x, block_scales, lines, first_block: 0, prefetch, sums, format }.run(simd);
                    }
                }
                for sums in &sums {
                    let columns = of.column..of.end.min(of.column + LANES);
                    write(sums, of.out, 0, &columns);
                    of.column = columns.end;
                }
            } else {
                let mut sums = [[[0.0; LANES]; P]; R];
                let x = TileInput { x, starts, groups, blocks: 0..of.blocks, cols };
                let (sums_of, format) = (&mut sums, PhantomData::<U>);
                Micro { x, block_scales, lines, first_block: 0, prefetch, sums: sums_of, format }.run(simd);
                let columns = of.column..of.end.min(of.column + P * LANES);
                write(&sums, of.out, 0, &columns);
                of.column = columns.end;
            }
        }
    }
}

/// Product of some blocks of P panels with all tiles of a task.
pub(super) struct RowTiles<'a, 'o, U, const R: usize, const P: usize> {
    pub pass: Pass<'a, 'o, R, P>,
    pub lines: [&'a [ByteLine]; P],
    /// Index of the block at the beginning of `lines`.
    pub first_block: usize,
    pub format: PhantomData<U>,
}

/// Arguments of [`RowTiles`] that do not depend on how the weights are stored.
pub(super) struct Pass<'a, 'o, const R: usize, const P: usize> {
    pub x: &'a Activations<'a>,
    /// Number of inputs.
    pub cols: usize,
    pub first_tile: usize,
    pub blocks: Range<usize>,
    pub block_scales: [&'a [BlockScales]; P],
    /// Weights to prefetch, and how many lines of each panel a tile prefetches.
    pub next_weights: [*const ByteLine; P],
    pub next_lines: usize,
    pub sums: &'a mut [[[[f32; LANES]; P]; R]],
    /// Columns that receive the sums after the last block.
    pub out: Option<(&'a mut Tile<'o, f32>, Range<usize>)>,
}

impl<U: Unpack, const R: usize, const P: usize> DotKernel for RowTiles<'_, '_, U, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        let Self { pass, lines, first_block, .. } = self;
        let Pass { x, cols, first_tile, blocks, block_scales, next_weights, next_lines, sums, mut out, .. } = pass;
        for tile in 0..sums.len() {
            let index = first_tile + tile;
            let mut weights_ahead = [next_weights[0]; MAX_TILE_PANELS];
            for (ahead, weights) in weights_ahead.iter_mut().zip(&next_weights) {
                *ahead = weights.wrapping_add(tile * next_lines);
            }
            let (mut next_blocks, mut rows) = (&[][..], [None; 2]);
            if tile + 1 < sums.len() {
                let mut next_sums = [std::ptr::null(); R];
                for (row, next) in next_sums.iter_mut().enumerate() {
                    *next = sums[tile + 1][row].as_flattened().as_ptr();
                }
                rows[0] = Some(next_sums);
                if let Some((out, columns)) = &mut out {
                    let last = out.rows().len() - 1;
                    let mut outputs = [std::ptr::null(); R];
                    for (row, output) in outputs.iter_mut().enumerate() {
                        *output = out.row(last.min((tile + 1) * R + row))[columns.clone()].as_ptr();
                    }
                    rows[1] = Some(outputs);
                }
                next_blocks = &x.tile::<R>(index + 1)[blocks.clone()];
            }
            let prefetch = Next {
                lines: weights_ahead,
                count: next_lines,
                each: next_lines.div_ceil(blocks.len() * BLOCK_PAIRS),
                first: blocks.start,
                blocks: next_blocks,
                rows,
            };
            let by_codes = const { codes::<S, U>(R).is_some() };
            let starts = if by_codes { &x.starts(index)[blocks.clone()] } else { &[][..] };
            let groups = if const { U::FACTORS.is_some() } { &x.groups(index)[blocks.clone()] } else { &[][..] };
            let tile_x = &x.tile::<R>(index)[blocks.clone()];
            let tile_x = TileInput { x: tile_x, starts, groups, blocks: blocks.clone(), cols };
            let (sums, format) = (&mut sums[tile], PhantomData::<U>);
            Micro { x: tile_x, block_scales, lines, first_block, prefetch: &prefetch, sums, format }.run(simd);
            if let Some((out, columns)) = &mut out {
                write(sums, out, tile * R, columns);
            }
        }
    }
}

/// Writes the sums of a tile whose first row is row `first` of the task; sums without an output are dropped.
#[inline(always)]
pub(super) fn write<const R: usize, const P: usize>(
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
