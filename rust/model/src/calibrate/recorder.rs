//! Recording the inputs of linear layers during a forward pass.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use ferrule_kernels::{Exec, PackedMatrix, PoolError, Scratch, matmul};

use super::inputs::{CalibratedSite, Recorded};
use crate::layer::{Observer, StreamRows};
use crate::weights::{Linear, LoadError};

/// Number of rows whose errors are computed at a time.
pub(super) const ERROR_ROWS: usize = 256;

/// Share of the error of the residual stream that a matrix corrects whose outputs are added to it. A half lowers the
/// divergence of the embedded model by 4 % (`benches/record/2026-11-29-amd-epyc-zen3/allocation-correction.txt`).
const STREAM_SHARE: f32 = 0.5;

/// Records the inputs of some linear layers. Each sequence runs through the layer of the exact model first, if weights
/// are corrected, and then through that of the quantized model.
pub(super) struct Recorder<'a> {
    /// Records by site.
    records: RefCell<BTreeMap<usize, Record>>,
    /// Packed matrices with which the quantized model computes linear layers, by site.
    replaced: &'a BTreeMap<usize, PackedMatrix>,
    run: Cell<Run>,
    buffers: RefCell<[Scratch<f32>; 2]>,
}

/// Forward pass of one sequence through the layer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// Number of tokens.
    pub tokens: usize,
    /// Whether it is that of the exact model.
    pub is_exact: bool,
    /// Whether the rest of the layer is left out after the last row that is recorded.
    pub stops: bool,
}

/// Record of one linear layer.
struct Record {
    recorded: Recorded,
    /// Rows of the exact model for the sequence that runs, if the weights are corrected.
    exact: Option<ExactRows>,
    /// Number of rows of the run that were seen.
    seen: usize,
}

/// Rows of the exact model.
#[derive(Default)]
struct ExactRows {
    /// Inputs, `[rows, columns]`.
    inputs: Vec<f32>,
    /// Residual stream that the outputs are added to, `[rows, outputs]`; empty if they are added to none.
    stream: Vec<f32>,
}

impl<'a> Recorder<'a> {
    /// Creates empty records of `sites`.
    pub fn new(sites: &[CalibratedSite], replaced: &'a BTreeMap<usize, PackedMatrix>) -> Result<Self, LoadError> {
        let record = |site: &CalibratedSite| {
            let exact = site.corrects.then(ExactRows::default);
            Ok((site.site, Record { recorded: Recorded::new(site)?, exact, seen: 0 }))
        };
        let records = sites.iter().map(record).collect::<Result<_, LoadError>>()?;
        let run = Run { tokens: 0, is_exact: false, stops: false };
        Ok(Self { records: RefCell::new(records), replaced, run: Cell::new(run), buffers: RefCell::default() })
    }

    /// Begins a forward pass.
    pub fn begin(&self, run: Run) {
        self.run.set(run);
        for record in self.records.borrow_mut().values_mut() {
            record.seen = 0;
            if let (true, Some(exact)) = (run.is_exact, &mut record.exact) {
                exact.inputs.clear();
                exact.stream.clear();
            }
        }
    }

    /// Returns whether all rows of the run were seen. Linear layers that see fewer rows than the sequence has tokens,
    /// such as those of experts, are never done.
    pub fn is_done(&self) -> bool {
        let Run { tokens, is_exact, stops } = self.run.get();
        let records = self.records.borrow();
        let mut wanted = records.values().filter(|record| !is_exact || record.exact.is_some());
        stops && wanted.all(|record| record.seen >= tokens)
    }

    /// Returns the records by site.
    pub fn recorded(self) -> BTreeMap<usize, Recorded> {
        let records = self.records.into_inner().into_iter();
        records.map(|(site, Record { recorded, .. })| (site, recorded)).collect()
    }
}

impl Record {
    /// Adds the inputs of the quantized model with the errors of their outputs.
    fn add(
        &mut self,
        exec: &Exec<'_>,
        layer: &Linear,
        x: &[f32],
        stream: Option<StreamRows<'_>>,
        [differences, errors]: &mut [Scratch<f32>; 2],
    ) -> Result<(), PoolError> {
        let (Some(exact), Recorded::Hessian(hessian)) = (&self.exact, &mut self.recorded) else {
            return self.recorded.add(exec, x);
        };
        let (columns, outputs, count) = (layer.weight.cols(), layer.outputs, x.len() / layer.weight.cols());
        for first in (0..count).step_by(ERROR_ROWS) {
            let rows = first..count.min(first + ERROR_ROWS);
            let seen = self.seen + rows.start;
            let x = &x[rows.start * columns..rows.end * columns];
            let differences = differences.take(x.len());
            let pairs = exact.inputs[seen * columns..][..x.len()].iter().zip(x);
            differences.iter_mut().zip(pairs).for_each(|(difference, (exact, x))| *difference = exact - x);
            let errors = errors.take(rows.len() * outputs);
            matmul(exec, differences, &layer.weight, errors)?;
            if let Some(StreamRows { rows: stream, scale, .. }) = stream {
                let exact = exact.stream[seen * outputs..][..errors.len()].iter();
                let pairs = exact.zip(&stream[rows.start * outputs..]);
                for (error, (exact, stream)) in errors.iter_mut().zip(pairs) {
                    *error += STREAM_SHARE * scale * (exact - stream);
                }
            }
            hessian.add_with_errors(exec, x, errors)?;
        }
        Ok(())
    }
}

impl Observer for Recorder<'_> {
    fn see(&self, exec: &Exec<'_>, layer: &Linear, x: &[f32], stream: Option<StreamRows<'_>>) -> Result<(), PoolError> {
        if let Some(record) = self.records.borrow_mut().get_mut(&layer.site) {
            match (self.run.get().is_exact, &mut record.exact) {
                (true, Some(exact)) => {
                    let tokens = self.run.get().tokens;
                    exact.inputs.reserve_exact((tokens * layer.weight.cols()).saturating_sub(exact.inputs.len()));
                    exact.inputs.extend_from_slice(x);
                    exact.stream.extend_from_slice(stream.map_or(&[], |stream| stream.rows));
                }
                (true, None) => {}
                (false, _) => record.add(exec, layer, x, stream, &mut self.buffers.borrow_mut())?,
            }
            record.seen += x.len() / layer.weight.cols();
        }
        // `Cancelled` ends the forward pass early.
        if self.is_done() { Err(PoolError::Cancelled) } else { Ok(()) }
    }

    fn replacement(&self, site: usize) -> Option<&PackedMatrix> {
        self.replaced.get(&site).filter(|_| !self.run.get().is_exact)
    }
}
