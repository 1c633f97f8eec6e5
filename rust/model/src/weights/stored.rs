//! Stored matrices: a view of a checkpoint's tensor, or random numbers.

use std::borrow::Cow;

use ferrule_formats::{BlockLayout, Checkpoint, CheckpointError, StoredTable, Tensor, WeightTensor};
use ferrule_kernels::RowSource;
use ferrule_kernels::quant::{GroupedFormat, Q8_0};

use super::error::LoadError;
use crate::limits::SpecError;
use crate::random::RandomMatrix;
use crate::spec::{Exponential, ModelSpec, PartSpec, TensorSpec};

/// A matrix whose rows can be read.
pub(crate) enum Stored<'a> {
    View(View<'a>),
    Random(RandomMatrix),
}

/// A matrix within a tensor of a checkpoint.
///
/// Element (row, column) is element `first + r * row_stride + column * column_stride` of the tensor, where `r` is the
/// row's place in the stored matrix: rows lie in runs of `part.rows`, one every `part.stride` rows.
#[derive(Clone)]
pub(crate) struct View<'a> {
    checkpoint: &'a Checkpoint,
    tensor: WeightTensor<'a>,
    rows: usize,
    first: usize,
    part: PartSpec,
    row_stride: usize,
    column_stride: usize,
    /// Exponential that the tensor stores in place of the values.
    exponential: Option<Exponential>,
}

impl RowSource for Stored<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::View(view) => view.read_row(row, out),
            Self::Random(matrix) => matrix.read_row(row, out),
        }
    }

    fn read_rows(&self, first: usize, columns: usize, out: &mut [f32]) {
        match self {
            Self::View(view) => view.read_rows(first, columns, out),
            Self::Random(matrix) => {
                (first..).zip(out.chunks_exact_mut(columns)).for_each(|(row, out)| matrix.read_row(row, out));
            }
        }
    }
}

impl Stored<'_> {
    /// Writes rows from `first` on, of `columns` columns, as blocks: the stored ones, or else q8_0 quantized from the
    /// values.
    ///
    /// # Panics
    /// If the matrix is random: those are packed from values.
    pub fn read_blocks(&self, first: usize, columns: usize, out: &mut [u8]) {
        match self {
            Self::View(view) => view.read_blocks(first, columns, out),
            Self::Random(_) => unreachable!("random matrices have no blocks"),
        }
    }

    pub fn rows(&self) -> usize {
        match self {
            Self::View(view) => view.rows,
            Self::Random(matrix) => matrix.rows,
        }
    }
}

impl<'a> View<'a> {
    /// Finds the tensors of a role and checks their shapes: `all_rows` rows of `columns` columns, or a vector of
    /// `all_rows` elements.
    pub fn of_role(
        checkpoint: &'a Checkpoint,
        spec: &ModelSpec,
        role: &str,
        all_rows: usize,
        columns: Option<usize>,
    ) -> Result<Vec<Self>, LoadError> {
        let usual = spec.tensor(role)?;
        let has = |place: &TensorSpec| checkpoint.has(&name_in(checkpoint, spec, &place.names[0]));
        // If both are missing, the error names the usual tensor.
        let place = match &usual.alternative {
            Some(other) if !has(usual) && has(other) => other,
            _ => usual,
        };
        let width = columns.unwrap_or(1);
        let mut left = all_rows;
        let views = place.names.iter().zip((1..=place.names.len()).rev()).map(|(name, names_left)| {
            let tensor = find(checkpoint, spec, name)?;
            // Tensors whose rows are concatenated may differ in their number of rows.
            let rows = match (names_left, place.part) {
                (1, _) => left,
                (_, None) => left.min(tensor.elements() / width.max(1)),
                (_, Some(_)) => left / names_left,
            };
            left -= rows;
            let part = place.part.unwrap_or_else(|| PartSpec::whole(rows));
            let stored_rows = part.stored_rows(rows);
            let matrix = stored_rows.saturating_mul(width);
            let first = place.stack.map_or(0, |stack| stack.index.saturating_mul(matrix));
            let transposed = place.transposed && !tensor.is_outputs_first();
            let mut expected = match columns {
                None => vec![stored_rows],
                Some(columns) if transposed => vec![columns, stored_rows],
                Some(columns) => vec![stored_rows, columns],
            };
            let mut joined = None;
            if let Some(stack) = place.stack {
                // DBRX stores the matrices of all experts as one, in the same order.
                let mut shape = expected.clone();
                shape[0] = shape[0].saturating_mul(stack.of);
                joined = Some(shape);
                expected.insert(0, stack.of);
            }
            let (row_stride, column_stride) = if transposed { (1, stored_rows) } else { (width, 1) };
            // Per-head norms are stored as [heads, head_dim] or as one row, a matrix of one row as a vector, a matrix of
            // several heads as [heads, rows, columns], and a convolution over whole patches of an image as [outputs,
            // channels, height, width].
            let is_convolution = role == "embedding_projection.weight" && tensor.shape().first() == expected.first();
            let like = expected.len() == 1
                || (place.stack.is_none() && (is_convolution || tensor.shape().last() == expected.last()));
            let same = tensor.shape() == expected
                || joined.as_deref() == Some(tensor.shape())
                || (like && tensor.elements() == matrix);
            if !same || !rows.is_multiple_of(part.rows) {
                return Err(LoadError::Shape {
                    tensor: tensor.name().to_owned(),
                    found: tensor.shape().to_vec(),
                    expected,
                    role: role.to_owned(),
                });
            }
            let exponential = place.exponential;
            Ok(Self { checkpoint, tensor, rows, first, part, row_stride, column_stride, exponential })
        });
        views.collect()
    }

    /// Returns `rows` rows of a tensor `[stored rows, columns]`, all or a part, or `None` if the shape is another.
    pub fn of_rows(
        checkpoint: &'a Checkpoint,
        tensor: &WeightTensor<'a>,
        rows: usize,
        part: Option<PartSpec>,
        columns: usize,
    ) -> Option<Self> {
        let part = part.unwrap_or_else(|| PartSpec::whole(rows));
        let fits = rows.is_multiple_of(part.rows) && tensor.shape() == [part.stored_rows(rows), columns];
        fits.then(|| Self {
            checkpoint,
            tensor: tensor.clone(),
            rows,
            first: 0,
            part,
            row_stride: columns,
            column_stride: 1,
            exponential: None,
        })
    }

    /// Returns the layout of the blocks that rows of `columns` columns consist of, if they do.
    pub fn blocks(&self, columns: usize) -> Option<BlockLayout> {
        let whole = |layout: &BlockLayout| self.column_stride == 1 && columns.is_multiple_of(layout.inputs());
        self.tensor.blocks().filter(whole)
    }

    /// Returns whether all rows lie at the same distance from their neighbours.
    pub fn is_plain(&self) -> bool {
        self.part.rows == self.rows
    }

    /// Returns `rows` rows from `first` on.
    ///
    /// # Panics
    /// If the view is not plain.
    pub fn slice(&self, first: usize, rows: usize) -> Self {
        assert!(self.is_plain() && first + rows <= self.rows, "a slice of a plain matrix");
        let first = self.first + (self.part.first + first) * self.row_stride;
        Self { rows, first, part: PartSpec::whole(rows), ..self.clone() }
    }

    /// Returns the transposed matrix; `columns` is the number of columns of this one.
    ///
    /// # Panics
    /// If the view is not plain.
    pub fn transposed(&self, columns: usize) -> Self {
        assert!(self.is_plain(), "a plain matrix");
        Self {
            rows: columns,
            first: self.first + self.part.first * self.row_stride,
            part: PartSpec::whole(columns),
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self.clone()
        }
    }

    /// Returns the matrix as a table of rows of `columns` elements that stays in its file; `None` if it is not a whole
    /// tensor whose rows can be read one by one.
    pub fn table(&self, columns: usize) -> Option<StoredTable> {
        let whole =
            self.exponential.is_none() && self.column_stride == 1 && self.tensor.elements() == self.rows * columns;
        if whole { self.checkpoint.table(&self.tensor, columns) } else { None }
    }

    pub fn tensor(&self) -> &WeightTensor<'a> {
        &self.tensor
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Releases the pages of the tensor; they are read from the file again when needed.
    pub fn release(&self) {
        self.checkpoint.release(&self.tensor);
    }

    /// Checks the scales and other values that quantized elements are computed from.
    pub fn check(&self) -> Result<(), CheckpointError> {
        // Quantized weights have their outputs first, so the elements of a row are neighbours.
        let end = if self.tensor.is_outputs_first() { self.start(self.rows - 1) + self.row_stride } else { 0 };
        self.tensor.check(self.start(0).min(end)..end)
    }

    /// Returns the index of a row's first element in the tensor.
    fn start(&self, row: usize) -> usize {
        let PartSpec { first, rows, stride } = self.part;
        self.first + (first + row / rows * stride + row % rows) * self.row_stride
    }

    /// Reads rows from `first` on; rows that are contiguous in the tensor are read at once.
    fn read_rows(&self, first: usize, columns: usize, out: &mut [f32]) {
        let rows = out.len() / columns;
        if rows > 1
            && self.column_stride == 1
            && self.start(first + rows - 1) == self.start(first) + (rows - 1) * columns
        {
            return self.tensor.read_f32(self.start(first), out);
        }
        (first..).zip(out.chunks_exact_mut(columns)).for_each(|(row, out)| self.read_row(row, out));
    }

    /// Does the same as [`Stored::read_blocks`]; rows that are contiguous in the tensor are read at once.
    fn read_blocks(&self, first: usize, columns: usize, out: &mut [u8]) {
        let Some(layout) = self.blocks(columns) else {
            let mut numbers = vec![0.0; out.len() / Q8_0::STORED.bytes * Q8_0::STORED.inputs];
            self.read_rows(first, columns, &mut numbers);
            return Q8_0::quantize(&numbers, out);
        };
        let row_bytes = columns / layout.inputs() * layout.bytes();
        let rows = out.len() / row_bytes;
        // Rows of blocks fill their stride, because blocks are stored in rows.
        if rows > 1 && self.start(first + rows - 1) == self.start(first) + (rows - 1) * self.row_stride {
            return self.tensor.read_blocks(self.start(first), out);
        }
        for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
            self.tensor.read_blocks(self.start(row), out);
        }
    }

    /// Returns the exponential that the tensor stores in place of the values; those of a matrix are stored as they are.
    pub fn exponential(&self) -> Option<Exponential> {
        self.exponential
    }

    /// Reads the values of a row of a vector or table: logarithms if the tensor stores exponentials.
    pub fn read_values(&self, row: usize, out: &mut [f32]) -> Result<(), LoadError> {
        self.read_row(row, out);
        let Some(exponential) = self.exponential else { return Ok(()) };
        out.iter_mut().try_for_each(|x| {
            let found = *x;
            let wrong = || LoadError::NotExponential { tensor: self.tensor.name().to_owned(), exponential, found };
            *x = exponential.value(found).ok_or_else(wrong)?;
            Ok(())
        })
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let start = self.start(row);
        if self.column_stride == 1 {
            self.tensor.read_f32(start, out);
        } else {
            self.tensor.read_f32_strided(start, self.column_stride, out);
        }
    }
}

/// Finds the tensor of a name, or of the name with another of the spec's prefixes.
fn find<'a>(checkpoint: &'a Checkpoint, spec: &ModelSpec, name: &str) -> Result<WeightTensor<'a>, LoadError> {
    Ok(checkpoint.weight(&name_in(checkpoint, spec, name))?)
}

/// Returns whether a checkpoint has the tensors of a role.
pub(crate) fn is_stored(checkpoint: &Checkpoint, spec: &ModelSpec, role: &str) -> Result<bool, LoadError> {
    Ok(spec.tensor(role)?.names.iter().all(|name| checkpoint.has(&name_in(checkpoint, spec, name))))
}

/// Finds the integers of a role that is one whole tensor.
pub(crate) fn stored_integers<'a>(
    checkpoint: &'a Checkpoint,
    spec: &ModelSpec,
    role: &str,
    expected: &[usize],
) -> Result<Tensor<'a>, LoadError> {
    let place = spec.tensor(role)?;
    let [name] = place.names.as_slice() else { return Err(SpecError::not_whole(role).into()) };
    let tensor = checkpoint.tensor(&name_in(checkpoint, spec, name))?;
    if tensor.shape() != expected {
        let (found, expected) = (tensor.shape().to_vec(), expected.to_vec());
        return Err(LoadError::Shape { tensor: tensor.name().to_owned(), found, expected, role: role.to_owned() });
    }
    if tensor.integer(0).is_none() {
        return Err(LoadError::NotIntegers { tensor: tensor.name().to_owned(), dtype: tensor.dtype().name() });
    }
    Ok(tensor)
}

/// Returns a name as it is, or with another of the spec's prefixes if the checkpoint has only that one.
fn name_in<'n>(checkpoint: &Checkpoint, spec: &ModelSpec, name: &'n str) -> Cow<'n, str> {
    let with = |(usual, other): &(String, String)| Some(format!("{other}{}", name.strip_prefix(usual.as_str())?));
    let mut others = spec.prefixes.iter().filter_map(with);
    let other = if checkpoint.has(name) { None } else { others.find(|other| checkpoint.has(other)) };
    other.map_or(Cow::Borrowed(name), Cow::Owned)
}
