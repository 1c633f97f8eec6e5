//! Random weights, to measure models of any shape without a checkpoint.

use ferrule_kernels::{Format, machine};

use super::{MatrixRequest, VectorReader, WeightSource};
use crate::quantization::Quantization;
use crate::random::RandomMatrix;
use crate::spec::TableSpec;
use crate::weights::error::LoadError;
use crate::weights::plan::MatrixPlan;
use crate::weights::stored::Stored;
use crate::weights::table::TableRows;

/// Random numbers as a source of weights; the same role gets the same numbers.
pub(super) struct RandomWeights;

impl<'a> WeightSource<'a> for RandomWeights {
    fn memory_limit(&self) -> Option<u64> {
        Some(machine::available_memory())
    }

    fn matrix(&self, request: MatrixRequest<'_>) -> Result<MatrixPlan<'a>, LoadError> {
        let MatrixRequest { name, parts, columns, .. } = request;
        let parts = parts.iter().map(|part| {
            // Slices of one role get different numbers by the name of the matrix.
            let seed = if part.slice.is_some() { &name } else { part.role };
            (Stored::Random(RandomMatrix::new(seed, part.rows)), part.format)
        });
        let parts = parts.collect();
        Ok(MatrixPlan::new(name, parts, columns))
    }

    fn lookup_format(&self, _: &str, _: [usize; 2], quantization: Quantization) -> Result<Format, LoadError> {
        Ok(quantization.embedding_and_lm_head())
    }

    fn table(&self, name: &str, spec: TableSpec) -> Result<TableRows, LoadError> {
        Ok(TableRows::Random(RandomMatrix::new(&format!("{name}.weight"), spec.rows)))
    }

    /// Tables are random, weights of norms and other factors are ones, and other vectors (biases) are zeros.
    fn vector(&self, role: &str, rows: usize, columns: Option<usize>) -> Result<VectorReader<'a>, LoadError> {
        let (table, is_factor) =
            (RandomMatrix::new(role, rows), ["norm.weight", "scalar.weight"].iter().any(|end| role.ends_with(end)));
        Ok(Box::new(move |out| {
            match columns {
                Some(columns) => {
                    let rows = out.chunks_exact_mut(columns).enumerate();
                    rows.for_each(|(row, out)| table.read_row(row, out));
                }
                None => out.fill(if is_factor { 1.0 } else { 0.0 }),
            }
            Ok(())
        }))
    }

    /// Ids of consecutive elements are consecutive, so that the ids of a row are different ones.
    fn ids(&self, _: &str, _: [usize; 2], below: usize) -> Result<VectorReader<'a>, LoadError> {
        Ok(Box::new(move |out| {
            out.iter_mut().enumerate().for_each(|(index, out)| *out = (index % below) as f32);
            Ok(())
        }))
    }
}
