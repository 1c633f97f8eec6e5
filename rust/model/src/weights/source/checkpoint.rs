//! Weights from the tensors of a checkpoint.

use ferrule_formats::Checkpoint;
use ferrule_kernels::{Format, machine};

use super::{MatrixPart, MatrixRequest, VectorReader, WeightSource};
use crate::limits::SpecError;
use crate::quantization::Quantization;
use crate::spec::{ModelSpec, TableSpec};
use crate::weights::error::LoadError;
use crate::weights::plan::MatrixPlan;
use crate::weights::stored::{Stored, View, is_stored, stored_integers};
use crate::weights::table::TableRows;

/// A checkpoint as a source of weights; the spec maps roles to tensor names.
pub(super) struct CheckpointWeights<'a> {
    pub checkpoint: &'a Checkpoint,
    pub spec: &'a ModelSpec,
}

impl<'a> CheckpointWeights<'a> {
    fn views(&self, role: &str, rows: usize, columns: Option<usize>) -> Result<Vec<View<'a>>, LoadError> {
        View::of_role(self.checkpoint, self.spec, role, rows, columns)
    }

    /// Returns the views of a part's rows, after the values of its tensors have been checked if `check_values`.
    fn part(&self, part: &MatrixPart<'_>, columns: usize, check_values: bool) -> Result<Vec<View<'a>>, LoadError> {
        let [rows, columns] = part.slice.map_or([part.rows, columns], |slice| slice.whole);
        let views = self.views(part.role, rows, Some(columns))?;
        if let Some(exponential) = views.iter().find_map(View::exponential) {
            let (field, value) = (format!("tensors.{}.exponential", part.role), exponential.name().to_owned());
            return Err(SpecError::Number { field, value, limit: "null for a matrix".to_owned() }.into());
        }
        if check_values {
            views.iter().try_for_each(View::check)?;
        }
        let Some(slice) = part.slice else { return Ok(views) };
        let [view] = views.as_slice() else { return Err(SpecError::not_whole(part.role).into()) };
        if !view.is_plain() {
            return Err(SpecError::not_whole(part.role).into());
        }
        let view = view.slice(slice.first, slice.rows);
        Ok(vec![if slice.transposed { view.transposed(columns) } else { view }])
    }
}

impl<'a> WeightSource<'a> for CheckpointWeights<'a> {
    fn memory_limit(&self) -> Option<u64> {
        Some(machine::available_memory())
    }

    fn matrix(&self, request: MatrixRequest<'_>) -> Result<MatrixPlan<'a>, LoadError> {
        let MatrixRequest { name, parts, columns, quantization, check_values } = request;
        let mut stored = Vec::with_capacity(parts.len());
        for part in parts {
            for view in self.part(part, columns, check_values)? {
                let format = quantization.of_stored(part.format, &view, columns);
                stored.push((Stored::View(view), format));
            }
        }
        // A floating-point format is the only one of its matrix, and f32 holds all of them.
        if stored.iter().any(|(_, format)| !format.is_integer() && *format != stored[0].1) {
            stored.iter_mut().for_each(|(_, format)| *format = Format::F32);
        }
        Ok(MatrixPlan::new(name, stored, columns))
    }

    fn lookup_format(
        &self,
        name: &str,
        [rows, columns]: [usize; 2],
        quantization: Quantization,
    ) -> Result<Format, LoadError> {
        Ok(quantization.of_lookup(&self.views(&format!("{name}.weight"), rows, Some(columns))?[0]))
    }

    fn table(&self, name: &str, TableSpec { rows, columns, .. }: TableSpec) -> Result<TableRows, LoadError> {
        let role = format!("{name}.weight");
        let views = self.views(&role, rows, Some(columns))?;
        let table = if let [view] = &views[..] { view.table(columns) } else { None };
        table.map(TableRows::Stored).ok_or_else(|| SpecError::not_whole(&role).into())
    }

    fn vector(&self, role: &str, rows: usize, columns: Option<usize>) -> Result<VectorReader<'a>, LoadError> {
        let views = self.views(role, rows, columns)?;
        Ok(Box::new(move |out| {
            views.iter().try_for_each(View::check)?;
            let rows = views.iter().flat_map(|view| (0..view.rows()).map(move |row| (view, row)));
            let mut rows = rows.zip(out.chunks_exact_mut(columns.unwrap_or(1)));
            rows.try_for_each(|((view, row), out)| view.read_values(row, out))
        }))
    }

    fn ids(&self, role: &str, shape: [usize; 2], below: usize) -> Result<VectorReader<'a>, LoadError> {
        let tensor = stored_integers(self.checkpoint, self.spec, role, &shape)?;
        let name = tensor.name().to_owned();
        Ok(Box::new(move |out| {
            for (index, out) in out.iter_mut().enumerate() {
                let found = tensor.integer(index).unwrap_or(i64::MIN);
                if usize::try_from(found).map_or(true, |id| id >= below) {
                    return Err(LoadError::Id { tensor: name.clone(), found: found.to_string(), below });
                }
                *out = found as f32;
            }
            Ok(())
        }))
    }

    fn check_constants(&self, role: &str, expected: &[i64]) -> Result<(), LoadError> {
        if !is_stored(self.checkpoint, self.spec, role)? {
            return Ok(());
        }
        let tensor = stored_integers(self.checkpoint, self.spec, role, &[expected.len()])?;
        for (index, &expected) in expected.iter().enumerate() {
            let found = tensor.integer(index).unwrap_or(i64::MIN);
            if found != expected {
                let (tensor, role) = (tensor.name().to_owned(), role.to_owned());
                return Err(LoadError::Constant { tensor, index, expected, found, role });
            }
        }
        Ok(())
    }
}
