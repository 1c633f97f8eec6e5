//! [`MatrixPlan`]: a matrix that is to be packed, and [`Packer`], what is made of it.

use std::ops::Range;

use ferrule_formats::PackedFile;
use ferrule_kernels::arch::LANES;
use ferrule_kernels::{
    Basis, CodeGrid, Exec, Format, InputStatistics, PackError, PackedMatrix, PrunedMatrix, RowSource,
};

use super::error::LoadError;
use super::sites::Site;
use super::sizes::MatrixSize;
use super::source::packed_matrix;
use super::stored::Stored;
use super::table::TokenTable;
use crate::pruning::{Pruning, StaysDense, WantedInputs};
use crate::random::RandomMatrix;

/// Receives the bytes of packed weights that are done, and of all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// A matrix that is to be packed from the rows of stored matrices, or that was packed before.
pub(crate) struct MatrixPlan<'a> {
    /// Name in a packed file: the roles of the parts.
    pub name: String,
    /// Number of the linear layer, if it is the matrix of one.
    pub site: Option<usize>,
    /// Roles of the rows, with the number of rows of each.
    pub roles: Vec<(String, usize)>,
    /// Whether the matrix was loaded before, for an earlier layer.
    pub is_again: bool,
    parts: Vec<Stored<'a>>,
    /// The file that has the packed matrix.
    file: Option<&'a PackedFile>,
    /// Formats, with the number of rows in each.
    pub bands: Vec<(Format, usize)>,
    pub columns: usize,
    /// Panels that this process packs; `None` for all.
    pub panels: Option<Range<usize>>,
    /// Pruning of the weights before they are packed.
    pub pruning: Option<Pruning>,
    /// Reason that the matrix is not pruned although pruning is for it.
    pub stays_dense: Option<StaysDense>,
}

/// Makes something of each plan: its size, or the packed matrix.
pub(crate) trait Packer {
    /// Output of a plan.
    type Matrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<Self::Matrix, LoadError>;

    /// Receives a table, which stays where it is.
    fn table(&mut self, _name: &str, _table: &TokenTable) -> Result<(), LoadError> {
        Ok(())
    }

    /// Returns the linear layers so far, in the order of loading.
    fn sites(&mut self) -> &mut Vec<Site>;

    /// Adds a linear layer and returns its number.
    fn add_site(&mut self, site: Site) -> usize {
        let sites = self.sites();
        sites.push(site);
        sites.len() - 1
    }
}

/// Computes the size of each matrix.
#[derive(Default)]
pub(crate) struct Measure {
    /// Bytes of all matrices so far.
    pub bytes: u64,
    sites: Vec<Site>,
}

impl Packer for Measure {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        self.bytes = self.bytes.saturating_add(size.bytes);
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

/// Packs each matrix and releases the source's pages behind it.
pub(crate) struct Pack<'a> {
    pub exec: Exec<'a>,
    pub done: u64,
    pub total: u64,
    pub progress: Progress<'a>,
    pub sites: Vec<Site>,
}

impl Packer for Pack<'_> {
    type Matrix = PackedMatrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<PackedMatrix, LoadError> {
        let matrix = plan.pack(&self.exec)?;
        plan.release();
        self.done += matrix.bytes() as u64;
        (self.progress)(self.done, self.total);
        Ok(matrix)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

impl<'a> MatrixPlan<'a> {
    /// Plans a matrix of stacked parts, each with its format.
    pub fn new(name: String, parts: Vec<(Stored<'a>, Format)>, columns: usize) -> Self {
        let formats: Vec<_> = parts.iter().map(|(part, format)| (*format, part.rows())).collect();
        let parts = parts.into_iter().map(|(part, _)| part).collect();
        Self {
            name,
            site: None,
            roles: Vec::new(),
            is_again: false,
            parts,
            file: None,
            bands: bands(&formats),
            columns,
            panels: None,
            pruning: None,
            stays_dense: None,
        }
    }

    /// Calls `read` for each part that has rows of `out`, which starts at row `first` and has rows of `width`.
    fn by_parts<T>(
        &self,
        mut first: usize,
        width: usize,
        mut out: &mut [T],
        read: impl Fn(&Stored<'a>, usize, &mut [T]),
    ) {
        for part in &self.parts {
            let count = part.rows().saturating_sub(first).min(out.len() / width);
            let (now, rest) = out.split_at_mut(count * width);
            if count > 0 {
                read(part, first, now);
            }
            (first, out) = ((first + count).saturating_sub(part.rows()), rest);
        }
    }

    /// Plans a matrix that a file has in these bands.
    pub fn packed(file: &'a PackedFile, name: String, bands: Vec<(Format, usize)>, columns: usize) -> Self {
        Self {
            name,
            site: None,
            roles: Vec::new(),
            is_again: false,
            parts: Vec::new(),
            file: Some(file),
            bands,
            columns,
            panels: None,
            pruning: None,
            stays_dense: None,
        }
    }

    /// Changes the formats of the rows.
    pub fn with_formats(self, formats: &[(Format, usize)]) -> Self {
        Self { bands: bands(formats), ..self }
    }

    /// Returns whether the matrix is quantized.
    pub fn is_quantized(&self) -> bool {
        self.bands.iter().all(|(format, _)| format.is_integer())
    }

    pub fn size(&self) -> MatrixSize {
        self.own_bands().into_iter().map(|(format, rows)| MatrixSize::of(format, rows, self.columns)).sum()
    }

    /// Returns the bands of the panels that this process packs.
    fn own_bands(&self) -> Vec<(Format, usize)> {
        let Some(panels) = &self.panels else { return self.bands.clone() };
        let (own, mut first) = (panels.start * LANES..panels.end * LANES, 0);
        let bands = self.bands.iter().map(|&(format, rows)| {
            let band = first..first + rows;
            first = band.end;
            (format, own.end.min(band.end).saturating_sub(own.start.max(band.start)))
        });
        bands.filter(|(_, rows)| *rows > 0).collect()
    }

    /// Returns the statistics of inputs that the matrix is packed with by [`MatrixPlan::pack_calibrated`].
    pub fn wanted_inputs(&self) -> Option<WantedInputs> {
        match self.pruning {
            Some(pruning) => pruning.method.inputs(),
            None => self.is_quantized().then_some(WantedInputs::Hessian(Basis::Rotated)),
        }
    }

    pub fn pack(&self, exec: &Exec<'_>) -> Result<PackedMatrix, LoadError> {
        let Some(panels) = &self.panels else { return self.pack_all(exec) };
        if self.pruning.is_none() && matches!(self.parts.first(), Some(Stored::View(_))) {
            // Rows are packed independently of each other, so the others are not read.
            let own = RowsFrom { plan: self, first: panels.start * LANES };
            return Ok(PackedMatrix::pack(exec, &self.own_bands(), self.columns, &own)?);
        }
        Ok(self.pack_all(exec)?.panels(panels.clone()).map_err(PackError::Memory)?)
    }

    /// Packs all panels.
    fn pack_all(&self, exec: &Exec<'_>) -> Result<PackedMatrix, LoadError> {
        if let Some(pruning) = self.pruning {
            return self.pack_pruned(exec, pruning, None);
        }
        match (self.file, self.parts.first()) {
            (Some(file), _) => packed_matrix(exec, file, &self.name, &self.bands, self.columns),
            // Random codes are as good as quantized random numbers, and quicker.
            (None, Some(Stored::Random(RandomMatrix { seed, .. }))) if self.bands[0].0.is_integer() => {
                Ok(PackedMatrix::random(exec, &self.bands, self.columns, *seed)?)
            }
            _ => Ok(PackedMatrix::pack(exec, &self.bands, self.columns, self)?),
        }
    }

    /// Packs the matrix with the least error for the inputs of the linear layer.
    pub fn pack_calibrated(&self, exec: &Exec<'_>, inputs: &InputStatistics) -> Result<PackedMatrix, LoadError> {
        if let Some(pruning) = self.pruning {
            return self.pack_pruned(exec, pruning, Some(inputs));
        }
        Ok(PackedMatrix::pack_calibrated(exec, &self.bands, self.columns, self, inputs)?)
    }

    /// Prunes the weights and packs them.
    fn pack_pruned(
        &self,
        exec: &Exec<'_>,
        pruning: Pruning,
        inputs: Option<&InputStatistics>,
    ) -> Result<PackedMatrix, LoadError> {
        let mut bands = Vec::with_capacity(self.bands.len());
        let mut first = 0;
        for &(format, rows) in &self.bands {
            let (source, grid) = (RowsFrom { plan: self, first }, CodeGrid::of(format));
            bands.push(PrunedMatrix::new(exec, rows, self.columns, &source, pruning.sparsity, inputs, grid)?);
            first += rows;
        }
        Ok(PackedMatrix::pack(exec, &self.bands, self.columns, &PrunedBands(bands))?)
    }

    /// Releases the source's pages behind the parts.
    pub fn release(&self) {
        for part in &self.parts {
            if let Stored::View(view) = part {
                view.release();
            }
        }
    }
}

impl RowSource for MatrixPlan<'_> {
    fn read_row(&self, mut row: usize, out: &mut [f32]) {
        for part in &self.parts {
            if row < part.rows() {
                return part.read_row(row, out);
            }
            row -= part.rows();
        }
    }

    fn read_rows(&self, first: usize, columns: usize, out: &mut [f32]) {
        self.by_parts(first, columns, out, |part, first, out| part.read_rows(first, columns, out));
    }

    fn read_stored(&self, first: usize, row_bytes: usize, out: &mut [u8]) {
        self.by_parts(first, row_bytes, out, |part, first, out| part.read_blocks(first, self.columns, out));
    }
}

/// Rows of a plan from `first` on.
struct RowsFrom<'a, 'p> {
    plan: &'a MatrixPlan<'p>,
    first: usize,
}

impl RowSource for RowsFrom<'_, '_> {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.plan.read_row(self.first + row, out);
    }

    fn read_rows(&self, first: usize, columns: usize, out: &mut [f32]) {
        self.plan.read_rows(self.first + first, columns, out);
    }

    fn read_stored(&self, first: usize, row_bytes: usize, out: &mut [u8]) {
        self.plan.read_stored(self.first + first, row_bytes, out);
    }
}

/// Pruned bands of a matrix, stacked.
struct PrunedBands(Vec<PrunedMatrix>);

impl PrunedBands {
    /// Returns the band of a row, and the place of the row in it.
    fn band(&self, mut row: usize) -> (&PrunedMatrix, usize) {
        let mut bands = self.0.iter().skip_while(|band| {
            let is_later = row >= band.rows();
            row -= if is_later { band.rows() } else { 0 };
            is_later
        });
        (bands.next().expect("a row of a band"), row)
    }
}

impl RowSource for PrunedBands {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        let (band, row) = self.band(row);
        band.read_row(row, out);
    }

    /// Panels are read one by one, and bands end with panels.
    fn read_stored(&self, first: usize, row_bytes: usize, out: &mut [u8]) {
        let (band, first) = self.band(first);
        band.read_stored(first, row_bytes, out);
    }
}

/// Returns the bands of a matrix whose parts have these formats and rows: neighbours of one format are joined.
///
/// Where a format would end within a panel, all rows get the widest format; int8 if a grouped format is among them,
/// because only rows that are stored in its blocks can be packed in it.
fn bands(parts: &[(Format, usize)]) -> Vec<(Format, usize)> {
    let mut bands: Vec<(Format, usize)> = Vec::with_capacity(parts.len());
    for &(format, rows) in parts {
        match bands.last_mut() {
            Some((last, count)) if *last == format => *count += rows,
            Some((_, count)) if !count.is_multiple_of(LANES) => {
                let has = |each: &&Format| parts.iter().any(|(format, _)| format == *each);
                let has_blocks = parts.iter().any(|(format, _)| format.stored_block().is_some());
                let widest = if has_blocks { None } else { Format::ALL.iter().find(has) };
                return vec![(*widest.unwrap_or(&Format::Int8), parts.iter().map(|(_, rows)| rows).sum())];
            }
            _ => bands.push((format, rows)),
        }
    }
    bands
}

#[cfg(test)]
mod tests {
    use ferrule_kernels::Format::{Int4, Int6, Int8, Q4K, Q6K};

    use super::*;

    #[test]
    fn bands_end_with_panels() {
        assert_eq!(bands(&[(Int4, 7)]), [(Int4, 7)]);
        assert_eq!(bands(&[(Int4, 7), (Int4, 9)]), [(Int4, 16)]);
        assert_eq!(bands(&[(Int4, 40), (Int4, 8), (Int6, 5)]), [(Int4, 48), (Int6, 5)]);
        assert_eq!(bands(&[(Int4, 40), (Int4, 7), (Int6, 5)]), [(Int6, 52)]);
        assert_eq!(bands(&[(Int6, 5), (Int4, 32), (Int6, 16)]), [(Int6, 53)]);
        assert_eq!(bands(&[(Int6, 16), (Int4, 5), (Int6, 16)]), [(Int6, 37)]);
        assert_eq!(bands(&[(Q4K, 16), (Q4K, 5)]), [(Q4K, 21)]);
        assert_eq!(bands(&[(Q4K, 16), (Q6K, 5)]), [(Q4K, 16), (Q6K, 5)]);
        assert_eq!(bands(&[(Q4K, 5), (Q6K, 16)]), [(Int8, 21)]);
    }
}
