//! The way of panels of bytes through the matmul, whatever their format.
//!
//! Few rows are one tile, and all of them use what was read of the weights; many rows are cut into tiles, which use what
//! was unpacked of some blocks one after the other.

use std::marker::PhantomData;
use std::ops::Range;

use super::activations::Activations;
use super::tile::{Ahead, MAX_TILE_PANELS, Micro, TileInput, UNPACKED_BLOCKS};
use crate::arch::{ByteLine, Kernel, LANES, LINE, Simd};
use crate::disjoint::Tile;
use crate::quant::grouped::UNPACKED_BLOCK_LINES;
use crate::quant::integer::{BLOCK_PAIRS, Steps, Unpack};

/// The most panels that are worked on side by side. Reading four streams at once is much faster than one.
pub(super) const MAX_STREAMS: usize = 4;

/// The most lines that are unpacked of a panel.
const MAX_ROOM_LINES: usize = UNPACKED_BLOCKS * UNPACKED_BLOCK_LINES;

/// The most rows of a task, for the same reason: a usual chunk of 512, in whole tiles of 2, 4 or 6.
pub(super) const MAX_TASK_ROWS: usize = 516;

/// Stored weights, as they go through the matmul.
pub(super) trait Weights: Sized + 'static {
    /// Blocks of a panel that are unpacked at a time for many rows.
    const BLOCKS: usize;
    /// Lines that one unpacked block takes.
    const BLOCK_LINES: usize;

    /// The number of the first line of block `index` of a panel.
    fn first_line(index: usize) -> usize;

    /// Multiplies with one tile of R rows.
    fn few<S: Simd, const R: usize>(panels: &mut Panels<'_, '_, Self>, simd: S);

    /// Multiplies some blocks of P panels with all tiles of a task. There is room for `BLOCKS` unpacked blocks of each
    /// panel.
    fn multiply<S: Simd, const R: usize, const P: usize>(
        simd: S,
        pass: Pass<'_, '_, R, P>,
        lines: [&[ByteLine]; P],
        room: &mut [ByteLine],
    );
}

/// How rows are cut into tiles.
#[derive(Clone, Copy)]
pub(super) enum Rows {
    /// All rows are one tile.
    Few(usize),
    /// There are tiles of so many rows.
    Many(usize),
}

impl Rows {
    pub fn of_tile(self) -> usize {
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
pub(super) struct TileRows {
    pub m: usize,
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

/// Panels of one format, times the rows of a task.
pub(super) struct Panels<'a, 'o, W> {
    pub x: &'a Activations<'a>,
    /// Inputs, and the blocks that they are.
    pub cols: usize,
    pub blocks: usize,
    /// Steps and lines of the panels, and what follows them in the band.
    pub steps: &'a [Steps],
    pub panel_steps: usize,
    pub lines: &'a [ByteLine],
    pub panel_lines: usize,
    /// The columns of `out` that the panels are.
    pub column: usize,
    pub end: usize,
    pub rows: Rows,
    pub out: &'a mut Tile<'o, f32>,
    pub weights: PhantomData<W>,
}

impl<W: Weights> Kernel for Panels<'_, '_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        macro_rules! few {
            ($rows:expr, $($n:literal)*) => {
                match $rows {
                    $($n => if const { $n <= few_rows::<S>() } { W::few::<S, $n>(&mut self, simd) })*
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
pub(super) const fn streams<S: Simd>(rows: usize) -> usize {
    let mut streams = MAX_STREAMS;
    while streams > 1 && streams * rows > S::BYTE_TILE_ROWS * S::BYTE_TILE_PANELS {
        streams /= 2;
    }
    streams
}

impl<'a, W: Weights> Panels<'a, '_, W> {
    /// Steps and lines of P panels from number `first` on.
    #[inline(always)]
    pub fn panels<const P: usize>(&self, first: usize) -> ([&'a [Steps]; P], [&'a [ByteLine]; P]) {
        let (mut steps, mut lines) = ([self.steps; P], [self.lines; P]);
        for p in 0..P {
            steps[p] = &self.steps[(first + p) * self.panel_steps..][..self.panel_steps];
            lines[p] = &self.lines[(first + p) * self.panel_lines..];
        }
        (steps, lines)
    }

    /// One tile of R rows, with weights as they come from memory: as many panels as there are side by side. Returns the
    /// number of the first that is left, and how many are.
    #[inline(always)]
    pub fn streams<S: Simd, U: Unpack, const R: usize>(&mut self, simd: S) -> [usize; 2] {
        let (side_by_side, format) = (streams::<S>(R), PhantomData::<U>);
        let groups = (self.end - self.column) / (side_by_side * LANES);
        match const { streams::<S>(R) } {
            4 => simd.vectorize(Streams::<_, _, R, 4> { of: self, first: 0, groups, format }),
            2 => simd.vectorize(Streams::<_, _, R, 2> { of: self, first: 0, groups, format }),
            _ => simd.vectorize(Streams::<_, _, R, 1> { of: self, first: 0, groups, format }),
        }
        [groups * side_by_side, (self.end - self.column).div_ceil(LANES)]
    }

    /// Any number of tiles of rows, with weights that are unpacked once for all of them.
    #[inline(always)]
    fn many<S: Simd, const R: usize, const P: usize>(&mut self, simd: S) {
        let mut sums = [[0.0; LANES]; MAX_TASK_ROWS * MAX_TILE_PANELS];
        let mut room = [ByteLine([0; LINE]); MAX_TILE_PANELS * MAX_ROOM_LINES];
        const { assert!(W::BLOCKS * W::BLOCK_LINES <= MAX_ROOM_LINES) }
        self.row_tiles::<S, R, P>(simd, 0, W::BLOCKS, &mut room, &mut sums);
    }

    /// All panels from number `panel` on, P at a time as far as there are that many, times all rows of the task; `blocks`
    /// blocks of each at a time.
    #[inline(always)]
    pub fn row_tiles<S: Simd, const R: usize, const P: usize>(
        &mut self,
        simd: S,
        mut panel: usize,
        blocks: usize,
        room: &mut [ByteLine],
        sums: &mut [[f32; LANES]],
    ) {
        while self.column + P * LANES <= self.end {
            self.row_tiles_of::<S, R, P>(simd, panel, blocks, room, sums);
            panel += P;
        }
        while self.column < self.end {
            self.row_tiles_of::<S, R, 1>(simd, panel, blocks, room, sums);
            panel += 1;
        }
    }

    /// P panels from number `panel` on. Sums pause in `sums`, close together: rows of the output are often a power of
    /// two apart and would push each other out of the cache.
    #[inline(always)]
    fn row_tiles_of<S: Simd, const R: usize, const P: usize>(
        &mut self,
        simd: S,
        panel: usize,
        blocks_at_once: usize,
        room: &mut [ByteLine],
        sums: &mut [[f32; LANES]],
    ) {
        let (steps, lines) = self.panels::<P>(panel);
        let tiles = self.out.rows().len().div_ceil(R);
        let sums = &mut sums.as_chunks_mut::<P>().0.as_chunks_mut::<R>().0[..tiles];
        let columns = self.column..self.end.min(self.column + P * LANES);
        let (x, cols, first_tile) = (self.x, self.cols, self.out.rows().start / R);
        for first in (0..self.blocks).step_by(blocks_at_once) {
            let blocks = first..self.blocks.min(first + blocks_at_once);
            let last = blocks.end == self.blocks;
            // One tile waits for weights as soon as it is done: what it asks for comes after those that come next.
            let next = if tiles == 1 { blocks.end + blocks_at_once } else { blocks.end };
            let past = next.saturating_sub(self.blocks);
            let next_line =
                if next < self.blocks { W::first_line(next) } else { P * self.panel_lines + W::first_line(past) };
            let next_weights = lines.map(|lines| lines.as_ptr().wrapping_add(next_line));
            let next_lines = W::first_line(blocks_at_once).div_ceil(tiles);
            let out = last.then_some((&mut *self.out, columns.clone()));
            let pass = Pass { x, cols, first_tile, blocks, steps, next_weights, next_lines, sums, out };
            W::multiply(simd, pass, lines, room);
        }
        self.column = columns.end;
    }
}

/// One tile of R rows, times groups of P panels that are read side by side.
pub(super) struct Streams<'s, 'a, 'o, W, U, const R: usize, const P: usize> {
    pub of: &'s mut Panels<'a, 'o, W>,
    /// The first panel.
    pub first: usize,
    pub groups: usize,
    pub format: PhantomData<U>,
}

impl<W: Weights, U: Unpack, const R: usize, const P: usize> Kernel for Streams<'_, '_, '_, W, U, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { of, first, groups, .. } = self;
        let x = of.x.tile::<R>(0);
        let starts = if S::BY_CODES { of.x.starts(0) } else { &[] };
        let groups_of_x = if U::FACTORS.is_some() { of.x.groups(0) } else { &[] };
        let mut sums = [[[0.0; LANES]; P]; R];
        for group in 0..groups {
            let (steps, lines) = of.panels::<P>(first + group * P);
            // The steps of the panels that come next: too few for the processor to see a stream in them.
            let bytes = P * size_of_val(steps[0]);
            for byte in (bytes..2 * bytes).step_by(LINE) {
                simd.prefetch(steps[0].as_ptr().cast::<u8>().wrapping_add(byte));
            }
            let ahead = Ahead::Weights { end: of.panel_lines, skip: (P - 1) * of.panel_lines };
            let x = TileInput { x, starts, groups: groups_of_x, blocks: 0..of.blocks, cols: of.cols };
            Micro { x, steps, lines, first_block: 0, ahead, sums: &mut sums, format: PhantomData::<U> }.run(simd);
            let columns = of.column..of.end.min(of.column + P * LANES);
            write(&sums, of.out, 0, &columns);
            of.column = columns.end;
        }
    }
}

/// Some blocks of P panels, times all tiles of a task.
pub(super) struct RowTiles<'a, 'o, U, const R: usize, const P: usize> {
    pub pass: Pass<'a, 'o, R, P>,
    pub lines: [&'a [ByteLine]; P],
    /// The block at the beginning of `lines`.
    pub first_block: usize,
    pub format: PhantomData<U>,
}

/// What [`RowTiles`] has to do, however the weights are stored.
pub(super) struct Pass<'a, 'o, const R: usize, const P: usize> {
    pub x: &'a Activations<'a>,
    /// Inputs.
    pub cols: usize,
    pub first_tile: usize,
    pub blocks: Range<usize>,
    pub steps: [&'a [Steps]; P],
    /// The weights that come next, and how many lines of each panel a tile asks for.
    pub next_weights: [*const ByteLine; P],
    pub next_lines: usize,
    pub sums: &'a mut [[[[f32; LANES]; P]; R]],
    /// After the last block, the columns that the sums are.
    pub out: Option<(&'a mut Tile<'o, f32>, Range<usize>)>,
}

impl<U: Unpack, const R: usize, const P: usize> Kernel for RowTiles<'_, '_, U, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { pass, lines, first_block, .. } = self;
        let Pass { x, cols, first_tile, blocks, steps, next_weights, next_lines, sums, mut out, .. } = pass;
        let tile_of = |tile: usize| &x.tile::<R>(first_tile + tile)[blocks.clone()];
        for tile in 0..sums.len() {
            let mut ahead = Ahead::Tile { blocks: &[], first: blocks.start, rows: [None; 2] };
            if sums.len() == 1 {
                let mut lines = [next_weights[0]; MAX_TILE_PANELS];
                lines[..P].copy_from_slice(&next_weights);
                ahead = Ahead::Lines { lines, each: next_lines.div_ceil(blocks.len() * BLOCK_PAIRS) };
            } else {
                for line in tile * next_lines..(tile + 1) * next_lines {
                    for weights in next_weights {
                        simd.prefetch(weights.wrapping_add(line).cast());
                    }
                }
            }
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
            let of_groups = if U::FACTORS.is_some() { &x.groups(first_tile + tile)[blocks.clone()] } else { &[][..] };
            let (sums, cols) = (&mut sums[tile], cols);
            let tile_x = TileInput { x: tile_x, starts, groups: of_groups, blocks, cols };
            Micro { x: tile_x, steps, lines, first_block, ahead, sums, format }.run(simd);
            if let Some((out, columns)) = &mut out {
                write(sums, out, tile * R, columns);
            }
        }
    }
}

/// Writes the sums of a tile whose first row is row `first` of the task, as far as there are such outputs.
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
