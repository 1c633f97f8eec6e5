//! Matrices that are to be packed, and who packs them.

use ferrule_formats::PackedFile;
use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Exec, Format, InputStatistics, PackedMatrix, RowSource};

use super::load::{LoadError, Progress};
use super::packed;
use super::sites::Site;
use super::sizes::MatrixSize;
use super::stored::{Source, Stored};
use crate::random::RandomMatrix;

/// A matrix that is to be packed: stored matrices, their rows one after the other. Or one that was packed before.
pub(crate) struct MatrixPlan<'a> {
    /// The roles of the parts: what a packed file calls it.
    pub name: String,
    /// The number of the linear map that it is of, if it is one's.
    pub site: Option<usize>,
    parts: Vec<Stored<'a>>,
    /// The file that has it, packed.
    file: Option<&'a PackedFile>,
    /// Formats and how many rows each holds, as the kernels take them.
    pub bands: Vec<(Format, usize)>,
    pub columns: usize,
}

/// What becomes of a plan: a size, or a matrix.
pub(crate) trait Packer {
    /// What stands for a packed matrix.
    type Matrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<Self::Matrix, LoadError>;

    /// The linear maps so far, in an order that is always the same.
    fn sites(&mut self) -> &mut Vec<Site>;

    /// Gives a linear map its number.
    fn number(&mut self, site: Site) -> usize {
        let sites = self.sites();
        sites.push(site);
        sites.len() - 1
    }
}

/// Says what a matrix comes to.
#[derive(Default)]
pub(crate) struct Measure {
    /// Of all matrices so far.
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

/// Packs, and gives back the source's memory behind what is done.
pub(crate) struct Pack<'a> {
    pub exec: Exec<'a>,
    pub source: Source<'a>,
    pub done: u64,
    pub total: u64,
    pub progress: Progress<'a>,
    pub sites: Vec<Site>,
}

impl Packer for Pack<'_> {
    type Matrix = PackedMatrix;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<PackedMatrix, LoadError> {
        let matrix = plan.pack(&self.exec)?;
        plan.release(self.source);
        self.done += matrix.bytes() as u64;
        (self.progress)(self.done, self.total);
        Ok(matrix)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

impl<'a> MatrixPlan<'a> {
    /// The matrix of `parts`, each of which is to be stored in the format beside it.
    pub fn new(name: String, parts: Vec<(Stored<'a>, Format)>, columns: usize) -> Self {
        let formats: Vec<_> = parts.iter().map(|(part, format)| (*format, part.rows())).collect();
        let parts = parts.into_iter().map(|(part, _)| part).collect();
        Self { name, site: None, parts, file: None, bands: bands(&formats), columns }
    }

    /// Gives each part that has some of the rows from `first` on its share of `out`, whose rows are `width` long.
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

    /// A matrix of so many rows that a file has, where the quantization has it `asked`.
    ///
    /// # Errors
    /// [`LoadError::Packed`] where the file does not have it, or not so large, or numbers for codes.
    pub fn packed(
        file: &'a PackedFile,
        name: String,
        asked: Format,
        rows: usize,
        columns: usize,
    ) -> Result<Self, LoadError> {
        let bands = packed::bands(file, &name, asked, rows, columns)?;
        Ok(Self { name, site: None, parts: Vec::new(), file: Some(file), bands, columns })
    }

    pub fn size(&self) -> MatrixSize {
        self.bands.iter().map(|&(format, rows)| MatrixSize::of(format, rows, self.columns)).sum()
    }

    pub fn pack(&self, exec: &Exec<'_>) -> Result<PackedMatrix, LoadError> {
        match (self.file, self.parts.first()) {
            (Some(file), _) => packed::matrix(exec, file, &self.name, &self.bands, self.columns),
            // Random bytes are as good as random numbers, and there is nothing to search for.
            (None, Some(Stored::Random(RandomMatrix { seed, .. }))) if self.bands[0].0.is_integer() => {
                Ok(PackedMatrix::random(exec, &self.bands, self.columns, *seed)?)
            }
            _ => Ok(PackedMatrix::pack(exec, &self.bands, self.columns, self)?),
        }
    }

    /// As [`MatrixPlan::pack`], by what is known of the map's inputs.
    pub fn pack_calibrated(&self, exec: &Exec<'_>, inputs: &InputStatistics) -> Result<PackedMatrix, LoadError> {
        Ok(PackedMatrix::pack_calibrated(exec, &self.bands, self.columns, self, inputs)?)
    }

    /// Gives back the source's memory behind the parts.
    pub fn release(&self, source: Source<'_>) {
        for part in &self.parts {
            if let (Source::Checkpoint(checkpoint), Stored::View(view)) = (source, part) {
                checkpoint.release(view.tensor());
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

/// The bands of a matrix whose parts have these formats and rows: neighbours that are stored alike are one. Where a
/// format would end within a panel, all rows get the widest; int8 if there are blocks among them, which only rows that
/// are stored so can be packed from.
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
