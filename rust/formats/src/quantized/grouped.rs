//! Integer codes with a scale and a zero point for each group of a row's inputs: `scale * (code - zero)`.

use std::ops::Range;

use half::f16;

use super::dequantize::Dequantize;
use super::error::QuantizedError;
use super::grid::Grid;
use super::parts::value_fault;
use super::streams::{BLOCK, MOST, Streams, word_at};
use crate::blocks::BlockLayout;
use crate::tensor::Tensor;

/// Number of rows that are read together. In the layouts of GPTQ and AWQ, neighbouring outputs are adjacent, and
/// reading one row would use one word of each cache line.
const ROWS: usize = MOST;

/// A matrix of integer codes with scales and zero points by group.
#[derive(Debug)]
pub(super) struct Grouped<'a> {
    /// Number of inputs per row.
    pub inputs: usize,
    pub codes: Codes<'a>,
    /// Scales by output and group.
    pub scales: Grid<'a>,
    pub zeros: Zeros<'a>,
    pub groups: Groups<'a>,
}

/// Codes of at most 8 bits.
#[derive(Debug)]
pub(super) enum Codes<'a> {
    /// One stream per output.
    Streams(Streams<'a>),
    /// Rows by input, with outputs in AWQ's order.
    Interleaved(Interleaved<'a>),
    /// I8 `[outputs, inputs]`; 128 is added to each.
    Bytes(Tensor<'a>),
}

/// Zero points: the codes of the value 0.
#[derive(Debug)]
pub(super) enum Zeros<'a> {
    /// One zero point for all groups.
    Constant(u8),
    /// One stream per group.
    Streams(Streams<'a>),
    /// One stream per group, with codes that are stored minus 1.
    StreamsLessOne(Streams<'a>),
    /// Rows by group, with outputs in AWQ's order.
    Interleaved(Interleaved<'a>),
    /// I8 by output and group, indexed as in [`Grid`]; `plus` is added to each.
    Bytes { tensor: Tensor<'a>, strides: [usize; 2], plus: i16 },
}

/// Group of each input.
#[derive(Debug)]
pub(super) enum Groups<'a> {
    /// Groups of this many consecutive inputs.
    Even(usize),
    /// I32 `[inputs]`: the group of each input, below `count`.
    Listed { groups: Tensor<'a>, count: usize },
}

/// I32 `[rows, outputs / 8]`: 4-bit codes, eight outputs in a word.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interleaved<'a> {
    pub words: Tensor<'a>,
    /// Words per row.
    pub width: usize,
}

impl Interleaved<'_> {
    /// Bit offset of each output's code in a word: AutoAWQ packs outputs 0, 2, 4, 6, 1, 3, 5, 7.
    const SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

    fn get(&self, row: usize, output: usize) -> u8 {
        (word_at(self.words.bytes, row * self.width + output / 8) >> Self::SHIFTS[output % 8]) as u8 & 15
    }
}

impl Codes<'_> {
    /// Returns the bits per code.
    fn bits(&self) -> u32 {
        match self {
            Self::Streams(streams) => streams.bits,
            Self::Interleaved(_) => 4,
            Self::Bytes(_) => 8,
        }
    }

    fn tensor(&self) -> &Tensor<'_> {
        match self {
            Self::Streams(Streams { words, .. }) | Self::Interleaved(Interleaved { words, .. }) => words,
            Self::Bytes(tensor) => tensor,
        }
    }

    /// Reads the codes of inputs `32 * block ..`, of outputs from `first` on. Codes beyond the last input are
    /// unspecified.
    fn read_block(&self, inputs: usize, first: usize, block: usize, out: &mut [[u8; BLOCK]]) {
        let columns = block * BLOCK..inputs.min((block + 1) * BLOCK);
        match self {
            Self::Streams(streams) => streams.read_block(first, block, out),
            Self::Interleaved(codes) => {
                for (index, input) in columns.enumerate() {
                    for (row, out) in out.iter_mut().enumerate() {
                        out[index] = codes.get(input, first + row);
                    }
                }
            }
            Self::Bytes(tensor) => {
                for (row, out) in out.iter_mut().enumerate() {
                    let codes = &tensor.bytes[(first + row) * inputs..][columns.clone()];
                    out.iter_mut().zip(codes).for_each(|(out, code)| *out = code ^ 0x80);
                }
            }
        }
    }
}

impl Zeros<'_> {
    fn at(&self, output: usize, group: usize) -> i16 {
        match self {
            Self::Constant(zero) => i16::from(*zero),
            Self::Streams(streams) => streams.get(group, output) as i16,
            Self::StreamsLessOne(streams) => streams.get_plus_one(group, output) as i16,
            Self::Interleaved(zeros) => i16::from(zeros.get(group, output)),
            Self::Bytes { tensor, strides, plus } => {
                i16::from(tensor.bytes[output * strides[0] + group * strides[1]].cast_signed()) + plus
            }
        }
    }

    fn tensor(&self) -> Option<&Tensor<'_>> {
        match self {
            Self::Constant(_) => None,
            Self::Streams(Streams { words, .. })
            | Self::StreamsLessOne(Streams { words, .. })
            | Self::Interleaved(Interleaved { words, .. }) => Some(words),
            Self::Bytes { tensor, .. } => Some(tensor),
        }
    }
}

impl<'a> Groups<'a> {
    /// Reads the groups that an I32 tensor lists; returns [`Groups::Even`] if they are consecutive groups of `size`.
    pub fn listed(groups: Tensor<'a>, count: usize, size: usize) -> Result<Self, QuantizedError> {
        let values = || groups.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
        let below = |value: i32| usize::try_from(value).is_ok_and(|value| value < count);
        if let Some((index, value)) = values().enumerate().find(|(_, value)| !below(*value)) {
            return Err(value_fault(&groups, index, value, format!("a group from 0 to {}", count.saturating_sub(1))));
        }
        let even = values().enumerate().all(|(index, value)| value as usize == index / size);
        Ok(if even { Self::Even(size) } else { Self::Listed { groups, count } })
    }
}

impl Grouped<'_> {
    /// Returns the scale and the zero point.
    fn at(&self, output: usize, group: usize) -> (f32, f32) {
        (self.scales.at(output, group), f32::from(self.zeros.at(output, group)))
    }

    /// Reads a tile: the elements of some rows in the same columns.
    ///
    /// `out`: `[rows, columns]`
    fn read_tile(&self, first: usize, rows: usize, column: usize, columns: usize, out: &mut [f32]) {
        // Listed groups change from input to input, so their scales and zero points are looked up in advance.
        let table: Vec<_> = match self.groups {
            Groups::Listed { count, .. } if columns >= count => {
                (0..count).flat_map(|group| (0..rows).map(move |row| self.at(first + row, group))).collect()
            }
            _ => Vec::new(),
        };
        let mut codes = [[0; BLOCK]; ROWS];
        let end = column + columns;
        for block in column / BLOCK..end.div_ceil(BLOCK) {
            self.codes.read_block(self.inputs, first, block, &mut codes[..rows]);
            let inputs = column.max(block * BLOCK)..end.min((block + 1) * BLOCK);
            for (row, codes) in codes[..rows].iter().enumerate() {
                let out = &mut out[row * columns..][inputs.start - column..inputs.end - column];
                let codes = &codes[inputs.start - block * BLOCK..];
                match self.groups {
                    Groups::Even(size) => {
                        let mut done = 0;
                        while done < out.len() {
                            let group = (inputs.start + done) / size;
                            let next = out.len().min((group + 1) * size - inputs.start);
                            let (scale, zero) = self.at(first + row, group);
                            for (value, code) in out[done..next].iter_mut().zip(&codes[done..]) {
                                *value = scale * (f32::from(*code) - zero);
                            }
                            done = next;
                        }
                    }
                    Groups::Listed { ref groups, .. } => {
                        for (index, (value, code)) in out.iter_mut().zip(codes).enumerate() {
                            let group = word_at(groups.bytes, inputs.start + index) as usize;
                            let (scale, zero) = match table.get(group * rows + row) {
                                Some(found) => *found,
                                None => self.at(first + row, group),
                            };
                            *value = scale * (f32::from(*code) - zero);
                        }
                    }
                }
            }
        }
    }
}

impl Dequantize for Grouped<'_> {
    fn parts(&self) -> Vec<Tensor<'_>> {
        let groups = match self.groups {
            Groups::Listed { groups, .. } => Some(groups),
            Groups::Even(_) => None,
        };
        [*self.codes.tensor(), self.scales.tensor()]
            .into_iter()
            .chain(self.zeros.tensor().copied())
            .chain(groups)
            .collect()
    }

    fn check(&self, _: Range<usize>) -> Result<(), QuantizedError> {
        self.scales.check()
    }

    fn read(&self, first: usize, mut out: &mut [f32]) {
        let (mut row, mut column) = (first / self.inputs, first % self.inputs);
        while !out.is_empty() {
            let whole = if column == 0 { (out.len() / self.inputs).min(ROWS) } else { 0 };
            let columns = out.len().min(self.inputs - column);
            let (now, rest) = out.split_at_mut(whole.max(1) * columns);
            self.read_tile(row, whole.max(1), column, columns, now);
            (row, column) = (row + whole.max(1), 0);
            out = rest;
        }
    }

    fn blocks(&self) -> Option<BlockLayout> {
        let Groups::Even(size) = self.groups else { return None };
        let layout = if self.codes.bits() <= 4 { BlockLayout::U4 } else { BlockLayout::U8 };
        let whole = self.inputs.is_multiple_of(BLOCK) && size.is_multiple_of(BLOCK);
        (whole && self.scales.is_exact_in_f16()).then_some(layout)
    }

    fn read_blocks(&self, first: usize, out: &mut [u8]) {
        let nibbles = self.codes.bits() <= 4;
        let layout = if nibbles { BlockLayout::U4 } else { BlockLayout::U8 };
        let Groups::Even(size) = self.groups else { unreachable!("blocks of listed groups") };
        let (blocks, bytes) = (self.inputs / BLOCK, layout.bytes());
        assert!(first.is_multiple_of(BLOCK) && out.len().is_multiple_of(bytes), "whole blocks");
        let mut codes = [[0; BLOCK]; ROWS];
        let mut write = |row: usize, rows: usize, block: usize, out: &mut [u8], stride: usize| {
            self.codes.read_block(self.inputs, row, block, &mut codes[..rows]);
            for (index, codes) in codes[..rows].iter().enumerate() {
                let group = block * BLOCK / size;
                let out = &mut out[index * stride..][..bytes];
                let scale = f16::from_f32(self.scales.at(row + index, group));
                out[..2].copy_from_slice(&scale.to_le_bytes());
                let zero = self.zeros.at(row + index, group).to_le_bytes();
                if nibbles {
                    out[2] = zero[0];
                    for (i, byte) in out[3..].iter_mut().enumerate() {
                        *byte = codes[i] | codes[BLOCK / 2 + i] << 4;
                    }
                } else {
                    out[2..4].copy_from_slice(&zero);
                    out[4..].copy_from_slice(codes);
                }
            }
        };
        let (mut row, mut block, mut done) = (first / self.inputs, first % self.inputs / BLOCK, 0);
        while done < out.len() {
            let rows = if block == 0 { ((out.len() - done) / (blocks * bytes)).min(ROWS) } else { 0 };
            let end = blocks.min(block + (out.len() - done) / bytes);
            let now = &mut out[done..];
            for (place, block) in (block..end).enumerate() {
                write(row, rows.max(1), block, &mut now[place * bytes..], blocks * bytes);
            }
            done += rows.max(1) * (end - block) * bytes;
            (row, block) = (row + rows.max(1), 0);
        }
    }
}
