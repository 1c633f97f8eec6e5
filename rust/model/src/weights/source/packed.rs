//! Weights from a packed file, which the kernels read as they are stored.

use std::ops::Range;

use ferrule_formats::{PackedErrorKind, PackedFile};
use ferrule_kernels::arch::LANES;
use ferrule_kernels::{BufferError, Exec, Format, PackError, PackedMatrix, SharedBytes, machine, memory};

use super::{MatrixRequest, VectorReader, WeightSource};
use crate::quantization::Quantization;
use crate::spec::TableSpec;
use crate::weights::buffers::{buffers, weights_name};
use crate::weights::error::LoadError;
use crate::weights::plan::MatrixPlan;
use crate::weights::table::TableRows;

/// Bytes that are read at a time, so that a cancelled load ends within about a tenth of a second.
const READ_BYTES: usize = 16 << 20;

/// Formats of a matrix, with the number of rows in each.
type Bands = Vec<(Format, usize)>;

/// A packed file as a source of weights.
pub(super) struct PackedWeights<'a> {
    pub file: &'a PackedFile,
    /// Whether the weights may exceed memory and be read from a mapped file again and again.
    pub may_page: bool,
}

impl<'a> WeightSource<'a> for PackedWeights<'a> {
    fn memory_limit(&self) -> Option<u64> {
        match (self.file.is_mapped(), self.may_page) {
            (true, true) => None,
            (true, false) => Some(machine::memory_for_files()),
            (false, _) => Some(machine::available_memory()),
        }
    }

    fn matrix(&self, request: MatrixRequest<'_>) -> Result<MatrixPlan<'a>, LoadError> {
        let MatrixRequest { name, parts, columns, .. } = request;
        // Either all parts are floating-point, and then in the same format, or all are integer.
        let asked = parts[0].format;
        let bands = bands(self.file, &name, asked, parts.iter().map(|part| part.rows).sum(), columns)?;
        Ok(MatrixPlan::packed(self.file, name, bands, columns))
    }

    fn lookup_format(&self, name: &str, _: [usize; 2], quantization: Quantization) -> Result<Format, LoadError> {
        Ok(first_format(self.file, name).unwrap_or(quantization.embedding_and_lm_head()))
    }

    fn table(&self, name: &str, TableSpec { rows, columns, .. }: TableSpec) -> Result<TableRows, LoadError> {
        Ok(TableRows::Stored(self.file.table(name, rows, columns)?))
    }

    fn vector(&self, role: &str, rows: usize, columns: Option<usize>) -> Result<VectorReader<'a>, LoadError> {
        let bytes = rows.saturating_mul(columns.unwrap_or(1)).saturating_mul(size_of::<f32>());
        let (file, range) = (self.file, self.file.range(role, bytes)?);
        Ok(Box::new(move |out| {
            let mut bytes = vec![0; range.len()];
            file.read(range.clone(), &mut bytes)?;
            for (value, stored) in out.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_le_bytes(*stored);
            }
            Ok(())
        }))
    }

    fn ids(&self, role: &str, [rows, columns]: [usize; 2], below: usize) -> Result<VectorReader<'a>, LoadError> {
        let (read, name) = (self.vector(role, rows, Some(columns))?, role.to_owned());
        Ok(Box::new(move |out| {
            read(out)?;
            let is_id = |x: &f32| *x >= 0.0 && x.fract() == 0.0 && (*x as usize) < below;
            match out.iter().find(|x| !is_id(x)) {
                Some(found) => Err(LoadError::Id { tensor: name.clone(), found: found.to_string(), below }),
                None => Ok(()),
            }
        }))
    }
}

/// Returns the format of a matrix's first rows, if the file has the matrix.
fn first_format(file: &PackedFile, name: &str) -> Option<Format> {
    Format::ALL.iter().copied().find(|format| file.bytes_of(&weights_name(name, 0, *format)).is_some())
}

/// Returns the formats in which a file stores a matrix, with the number of rows in each.
///
/// `asked` is the format that the quantization asks for. A floating-point format must be the same; an integer format
/// may be another integer format, such as the one that the checkpoint stored.
fn bands(file: &PackedFile, name: &str, asked: Format, rows: usize, columns: usize) -> Result<Bands, LoadError> {
    let mut bands: Bands = Vec::new();
    let mut left = rows;
    while left > 0 {
        let named = |format: &Format| weights_name(name, bands.len(), *format);
        let found = Format::ALL.iter().find_map(|format| Some((*format, file.bytes_of(&named(format))?)));
        let Some((format, bytes)) = found else {
            return Err(file.missing(&named(&bands.last().map_or(Format::Int8, |band| band.0))).into());
        };
        if format != asked && !(format.is_integer() && asked.is_integer()) {
            return Err(file.error(PackedErrorKind::Format { tensor: named(&format), asked: asked.name() }).into());
        }
        if let Some(block) = format.stored_block().map(|block| block.inputs)
            && !columns.is_multiple_of(block)
        {
            return Err(file.error(PackedErrorKind::Blocks { tensor: named(&format), block, inputs: columns }).into());
        }
        // A floating-point matrix is one band. Panels of integer formats are whole lines, so their tensors have no padding.
        let panel = PackedMatrix::buffer_bytes(format, LANES, columns).ok_or_else(LoadError::too_large)?[0];
        let held = if format.is_integer() { bytes.checked_div(panel).unwrap_or(0).saturating_mul(LANES) } else { left };
        if held == 0 || held > left.next_multiple_of(LANES) || (!format.is_integer() && !bands.is_empty()) {
            return Err(file
                .error(PackedErrorKind::Rows { tensor: named(&format), rows: held, expected: left })
                .into());
        }
        bands.push((format, held.min(left)));
        left = left.saturating_sub(held);
    }
    ranges(file, name, &bands, columns)?;
    Ok(bands)
}

/// Returns the byte range of each buffer of a matrix, in the order of [`PackedMatrix::buffers`].
fn ranges(
    file: &PackedFile,
    name: &str,
    bands: &[(Format, usize)],
    columns: usize,
) -> Result<Vec<Range<usize>>, LoadError> {
    let range = |(buffer, bytes): (String, usize)| Ok(if bytes == 0 { 0..0 } else { file.range(&buffer, bytes)? });
    buffers(name, bands, columns)?.into_iter().map(range).collect()
}

/// Loads a matrix: shares the pages of a mapped file, or reads it into memory.
pub(in crate::weights) fn matrix(
    exec: &Exec<'_>,
    file: &PackedFile,
    name: &str,
    bands: &[(Format, usize)],
    columns: usize,
) -> Result<PackedMatrix, LoadError> {
    let mut ranges = ranges(file, name, bands, columns)?.into_iter();
    if let Some(map) = file.map() {
        let shared = ranges.map(|range| SharedBytes::new(map.clone(), range).expect("a tensor lies within the file"));
        return PackedMatrix::shared(bands, columns, shared).map_err(|error| match error {
            BufferError::Memory(error) => PackError::Memory(error).into(),
            error => unreachable!("ranges of a packed file begin on lines and are as long as asked for: {error}"),
        });
    }
    PackedMatrix::filled(bands, columns, |bytes| {
        let range = ranges.next().expect("a range for each buffer");
        if exec.pool.nodes() > 1 {
            memory::zero_pages(exec, bytes)?;
        }
        for (begin, bytes) in range.step_by(READ_BYTES).zip(bytes.chunks_mut(READ_BYTES)) {
            if exec.cancel.poll() {
                return Err(LoadError::Cancelled);
            }
            file.read(begin..begin + bytes.len(), bytes)?;
        }
        Ok(())
    })
}
