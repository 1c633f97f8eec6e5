//! What a role's weights are read from: a matrix within a checkpoint, or random numbers.

use ferrule_formats::{Checkpoint, PackedFile, WeightTensor};
use ferrule_kernels::RowSource;

use super::load::LoadError;
use crate::random::RandomMatrix;
use crate::spec::{ModelSpec, PartSpec};

/// Where weights come from.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// A checkpoint's files.
    Checkpoint(&'a Checkpoint),
    /// Weights that were packed before.
    Packed {
        /// What has them.
        file: &'a PackedFile,
        /// Whether they may be more than memory holds, and so be read again and again where the file is mapped.
        may_page: bool,
    },
    /// Random numbers, made as they are packed.
    Random,
}

/// A matrix that is stored somewhere.
pub(crate) enum Stored<'a> {
    View(View<'a>),
    Random(RandomMatrix),
}

/// A matrix within a tensor: element (row, column) is `first + place(row) * row_stride + column * column_stride`, and
/// rows lie in runs of `part.rows`, every `part.stride`.
#[derive(Clone)]
pub(crate) struct View<'a> {
    tensor: WeightTensor<'a>,
    rows: usize,
    first: usize,
    part: PartSpec,
    row_stride: usize,
    column_stride: usize,
}

impl RowSource for Stored<'_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::View(view) => view.read_row(row, out),
            Self::Random(matrix) => matrix.read_row(row, out),
        }
    }
}

impl Stored<'_> {
    pub fn rows(&self) -> usize {
        match self {
            Self::View(view) => view.rows,
            Self::Random(matrix) => matrix.rows,
        }
    }
}

impl<'a> View<'a> {
    /// The tensors of a role, checked against their shapes: `all_rows` rows of so many columns, or a vector's elements.
    pub fn of_role(
        checkpoint: &'a Checkpoint,
        spec: &ModelSpec,
        role: &str,
        all_rows: usize,
        columns: Option<usize>,
    ) -> Result<Vec<Self>, LoadError> {
        let place = spec.tensor(role)?;
        let rows = all_rows / place.names.len();
        let part = place.part.unwrap_or_else(|| PartSpec::whole(rows));
        let whole = rows * place.names.len() == all_rows && rows.is_multiple_of(part.rows);
        let stored_rows = part.stored_rows(rows);
        let mut expected = match columns {
            None => vec![stored_rows],
            Some(columns) if place.transposed => vec![columns, stored_rows],
            Some(columns) => vec![stored_rows, columns],
        };
        let width = columns.unwrap_or(1);
        let matrix = stored_rows.saturating_mul(width);
        let mut first = 0;
        if let Some(stack) = place.stack {
            expected.insert(0, stack.of);
            first = stack.index.saturating_mul(matrix);
        }
        let (row_stride, column_stride) = if place.transposed { (1, stored_rows) } else { (width, 1) };
        let views = place.names.iter().map(|name| {
            let tensor = find(checkpoint, spec, name)?;
            // Norms of each head are stored as [heads, head_dim] or as one row.
            let same = tensor.shape() == expected || (expected.len() == 1 && tensor.elements() == matrix);
            if !same || !whole {
                return Err(LoadError::Shape {
                    tensor: tensor.name().to_owned(),
                    found: tensor.shape().to_vec(),
                    expected: expected.clone(),
                    role: role.to_owned(),
                });
            }
            Ok(Self { tensor, rows, first, part, row_stride, column_stride })
        });
        views.collect()
    }

    /// So many rows of a tensor `[stored rows, columns]`: all of them, or a part; none if that is not its shape.
    pub fn of_rows(tensor: WeightTensor<'a>, rows: usize, part: Option<PartSpec>, columns: usize) -> Option<Self> {
        let part = part.unwrap_or_else(|| PartSpec::whole(rows));
        let fits = rows.is_multiple_of(part.rows) && tensor.shape() == [part.stored_rows(rows), columns];
        fits.then_some(Self { tensor, rows, first: 0, part, row_stride: columns, column_stride: 1 })
    }

    /// Whether all rows lie at the same distance from their neighbours.
    pub fn is_plain(&self) -> bool {
        self.part.rows == self.rows
    }

    /// `rows` rows from `first` on.
    ///
    /// # Panics
    /// If the view is not plain.
    pub fn slice(&self, first: usize, rows: usize) -> Self {
        assert!(self.is_plain() && first + rows <= self.rows, "a slice of a plain matrix");
        let first = self.first + (self.part.first + first) * self.row_stride;
        Self { rows, first, part: PartSpec::whole(rows), ..self.clone() }
    }

    /// The same with rows for columns, of which there are `columns`.
    ///
    /// # Panics
    /// As [`View::slice`].
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

    pub fn tensor(&self) -> &WeightTensor<'a> {
        &self.tensor
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        let PartSpec { first, rows, stride } = self.part;
        let start = self.first + (first + row / rows * stride + row % rows) * self.row_stride;
        if self.column_stride == 1 {
            self.tensor.read_f32(start, out);
        } else {
            self.tensor.read_f32_strided(start, self.column_stride, out);
        }
    }
}

/// The tensor of a name, or of one that differs in a prefix.
fn find<'a>(checkpoint: &'a Checkpoint, spec: &ModelSpec, name: &str) -> Result<WeightTensor<'a>, LoadError> {
    let with = |(usual, other): &(String, String)| Some(format!("{other}{}", name.strip_prefix(usual.as_str())?));
    let mut others = spec.prefixes.iter().filter_map(with);
    let other = if checkpoint.has(name) { None } else { others.find(|other| checkpoint.has(other)) };
    Ok(checkpoint.weight(other.as_deref().unwrap_or(name))?)
}
