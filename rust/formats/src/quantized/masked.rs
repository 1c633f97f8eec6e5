//! Sparse matrices of compressed-tensors: the values that are stored, and a bitmask of their places.
//!
//! Tensors of a module: `compressed`, the stored values in row-major order; `bitmask` U8 `[outputs, ceil(inputs / 8)]`, one
//! bit per element, lowest bits first; `shape`, outputs and inputs. With `sparse-bitmask`, `compressed` is a vector and
//! `row_offsets` I64 `[outputs]` has the number of values before each row. With `sparse-24-bitmask`, `compressed` is
//! `[outputs, inputs / 2]`, because exactly two of four elements are stored. Elements that are not stored are zero.

use std::ops::Range;
use std::sync::Arc;

use super::dequantize::{Dequantize, Quantized};
use super::error::QuantizedError;
use super::grid::Grid;
use super::parts::{Parts, expect_shape, shape_fault, value_fault};
use crate::dtype::{Dtype, FloatDtype};
use crate::tensor::Tensor;

/// Numbers of a stored value.
#[derive(Debug)]
pub(super) enum Values<'a> {
    /// Floating-point numbers.
    Float(FloatDtype),
    /// 8-bit codes with a scale for each block of outputs and inputs.
    Scaled { numbers: &'static [f32; 256], scales: Grid<'a>, block: [usize; 2] },
}

/// Places of the stored values.
#[derive(Debug)]
pub(super) struct Mask<'a> {
    /// Stored values, in row-major order.
    pub compressed: Tensor<'a>,
    bitmask: Tensor<'a>,
    /// Number of values before each row; `None` if exactly two of four elements are stored.
    row_offsets: Option<Tensor<'a>>,
    pub outputs: usize,
    pub inputs: usize,
}

/// A sparse matrix.
#[derive(Debug)]
pub(super) struct Masked<'a> {
    pub mask: Mask<'a>,
    pub values: Values<'a>,
}

impl<'a> Mask<'a> {
    /// Finds the tensors of a weight by `compressed`, which has the stored values.
    pub fn new(parts: &Parts<'a>, name: &str, compressed: Tensor<'a>) -> Result<Self, QuantizedError> {
        let prefix = compressed.name.strip_suffix("compressed").unwrap_or(compressed.name);
        let part = |end: &str| parts.require(name, &format!("{prefix}{end}"));
        let (shape, bitmask) = (part("shape")?, part("bitmask")?);
        parts.expect_dtype(&shape, &[Dtype::I64])?;
        expect_shape(&shape, &[&[2], &[2, 1]])?;
        let size = |index: usize| {
            let found = integer(&shape, index);
            let size = usize::try_from(found).ok().filter(|size| *size > 0 && *size < 1 << 32);
            size.ok_or_else(|| value_fault(&shape, index, found, "from 1 to 4294967295"))
        };
        let [outputs, inputs] = [size(0)?, size(1)?];
        parts.expect_dtype(&bitmask, &[Dtype::U8])?;
        expect_shape(&bitmask, &[&[outputs, inputs.div_ceil(8)]])?;
        let row_offsets = match *compressed.shape {
            [_] => {
                let offsets = part("row_offsets")?;
                parts.expect_dtype(&offsets, &[Dtype::I64])?;
                expect_shape(&offsets, &[&[outputs]])?;
                Some(offsets)
            }
            [rows, columns] if rows == outputs && inputs.is_multiple_of(4) && columns == inputs / 2 => None,
            _ => {
                let expected = format!("[values], or [{outputs}, {inputs} / 2] with two of four elements");
                return Err(shape_fault(&compressed, expected));
            }
        };
        Ok(Self { compressed, bitmask, row_offsets, outputs, inputs })
    }

    /// Returns the weight with these values.
    pub fn with(self, values: Values<'a>) -> Quantized<'a> {
        Quantized { shape: vec![self.outputs, self.inputs], numbers: Arc::new(Masked { mask: self, values }) }
    }

    /// Returns the bits of a row.
    fn bits(&self, row: usize) -> &'a [u8] {
        let width = self.inputs.div_ceil(8);
        &self.bitmask.bytes[row * width..][..width]
    }

    /// Returns the number of values before a row, or of all values after the last.
    fn start(&self, row: usize) -> usize {
        match &self.row_offsets {
            None => row * (self.inputs / 2),
            Some(_) if row == self.outputs => self.compressed.elements(),
            // Checked before values are read.
            Some(offsets) => usize::try_from(integer(offsets, row)).unwrap_or(usize::MAX),
        }
    }

    /// Checks that the bits of these rows have as many values as are stored for them.
    fn check(&self, rows: Range<usize>) -> Result<(), QuantizedError> {
        let width = self.inputs.div_ceil(8);
        for row in rows {
            let bits = self.bits(row);
            if let (rest @ 1.., Some(last)) = (self.inputs % 8, bits.last())
                && last >> rest != 0
            {
                let limit = format!("less than {}, for {} inputs", 1u32 << rest, self.inputs);
                return Err(value_fault(&self.bitmask, (row + 1) * width - 1, last, limit));
            }
            let Some(offsets) = &self.row_offsets else {
                let halves = |byte: &u8| [byte & 15, byte >> 4].into_iter().all(|half| half.count_ones() == 2);
                let whole = &bits[..self.inputs / 8];
                let ends = self.inputs.is_multiple_of(8) || bits.last().is_some_and(|last| last.count_ones() == 2);
                let invalid = whole.iter().position(|byte| !halves(byte)).or((!ends).then_some(width - 1));
                match invalid {
                    Some(at) => {
                        let limit = "a byte with two bits set for each four inputs";
                        return Err(value_fault(&self.bitmask, row * width + at, bits[at], limit));
                    }
                    None => continue,
                }
            };
            let (start, count) =
                (integer(offsets, row), bits.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>());
            let values = self.compressed.elements() as u64;
            let Some(start) = u64::try_from(start).ok().filter(|start| *start <= values) else {
                return Err(value_fault(offsets, row, start, format!("from 0 to {values}, the number of values")));
            };
            if row == 0 && start != 0 {
                return Err(value_fault(offsets, 0, start, 0));
            }
            let end = start.saturating_add(count);
            if row + 1 == self.outputs && end != values {
                let expected = format!("[{end}], as the last bits of {} say", self.bitmask.name);
                return Err(shape_fault(&self.compressed, expected));
            }
            // The next row is checked only if its elements are read.
            if end > values {
                let limit = format!(
                    "at most {}, so that the {count} values of row {row} are stored",
                    values.saturating_sub(count)
                );
                return Err(value_fault(offsets, row, start, limit));
            }
            if row + 1 < self.outputs && u64::try_from(integer(offsets, row + 1)) != Ok(end) {
                let limit = format!("{end}, after {count} values of row {row}");
                return Err(value_fault(offsets, row + 1, integer(offsets, row + 1), limit));
            }
        }
        Ok(())
    }

    /// Calls `value` with the column of each stored element of `columns` in a row, and the index of its value.
    fn for_each(&self, row: usize, columns: Range<usize>, mut value: impl FnMut(usize, usize)) {
        let bits = self.bits(row);
        let before = |end: usize| {
            let whole: usize = bits[..end / 8].iter().map(|byte| byte.count_ones() as usize).sum();
            whole + bits.get(end / 8).map_or(0, |byte| (byte & ((1 << (end % 8)) - 1)).count_ones() as usize)
        };
        let mut at = self.start(row) + before(columns.start);
        for (byte, bits) in bits.iter().enumerate().take(columns.end.div_ceil(8)).skip(columns.start / 8) {
            let mut left = *bits;
            while left != 0 {
                let column = 8 * byte + left.trailing_zeros() as usize;
                left &= left - 1;
                if columns.contains(&column) {
                    value(column, at);
                    at += 1;
                }
            }
        }
    }
}

impl Dequantize for Masked<'_> {
    fn parts(&self) -> Vec<Tensor<'_>> {
        let scales = match &self.values {
            Values::Float(_) => None,
            Values::Scaled { scales, .. } => Some(scales.tensor()),
        };
        let Mask { compressed, bitmask, row_offsets, .. } = &self.mask;
        [*compressed, *bitmask].into_iter().chain(*row_offsets).chain(scales).collect()
    }

    fn check(&self, elements: Range<usize>) -> Result<(), QuantizedError> {
        let inputs = self.mask.inputs;
        self.mask.check(elements.start / inputs..elements.end.div_ceil(inputs))?;
        match &self.values {
            Values::Float(_) => Ok(()),
            Values::Scaled { scales, .. } => scales.check(),
        }
    }

    fn read(&self, first: usize, mut out: &mut [f32]) {
        let Self { mask, values } = self;
        let (mut row, mut column) = (first / mask.inputs, first % mask.inputs);
        let bytes = mask.compressed.bytes;
        while !out.is_empty() {
            let run = out.len().min(mask.inputs - column);
            let (now, rest) = out.split_at_mut(run);
            now.fill(0.0);
            mask.for_each(row, column..column + run, |at, index| {
                now[at - column] = match values {
                    Values::Float(float) => float.read(bytes, index),
                    Values::Scaled { numbers, scales, block } => {
                        numbers[usize::from(bytes[index])] * scales.at(row / block[0], at / block[1])
                    }
                };
            });
            (out, row, column) = (rest, row + 1, 0);
        }
    }
}

/// Returns an element of an I64 tensor.
fn integer(tensor: &Tensor<'_>, index: usize) -> i64 {
    i64::from_le_bytes(tensor.bytes.as_chunks().0[index])
}
