//! Recording the inputs of a layer's linear layers while it runs.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ferrule_kernels::{
    AllocError, Basis, CalibrationError, Exec, Hessian, InputNorms, InputStatistics, PoolError, machine,
};

use super::float_bytes;
use super::pass::Pass;
use crate::layer::Observer;
use crate::pruning::WantedInputs;
use crate::weights::{Layer, LoadError, MatrixPlan, MatrixSize, Packer, Site};

/// Provides what was recorded of the inputs of linear layers.
pub(super) trait Inputs {
    /// Returns what was recorded of linear layer `site`, which is packed next. Calls `work` with the work that was done for
    /// it, in bytes of packed matrices.
    fn take(&mut self, site: usize, work: &mut dyn FnMut(f64)) -> Result<Option<Recorded>, LoadError>;
}

/// The Hessian of the linear layer that is packed first, if it is known.
impl Inputs for Option<Hessian> {
    fn take(&mut self, _: usize, _: &mut dyn FnMut(f64)) -> Result<Option<Recorded>, LoadError> {
        Ok(Option::take(self).map(Recorded::Hessian))
    }
}

/// Record of the inputs of a linear layer.
pub(super) enum Recorded {
    Hessian(Hessian),
    Norms(InputNorms),
}

impl Recorded {
    /// Creates the empty record of a linear layer.
    fn new(site: &CalibratedSite) -> Result<Self, LoadError> {
        Ok(match site.wanted {
            WantedInputs::Hessian(basis) => Self::Hessian(zeroed(site.columns, basis)?),
            WantedInputs::Norms => Self::Norms(InputNorms::zeroed(site.columns)),
        })
    }

    /// Adds the rows of `x: [rows, columns]`.
    fn add(&mut self, exec: &Exec<'_>, x: &[f32]) -> Result<(), PoolError> {
        match self {
            Self::Hessian(hessian) => hessian.add(exec, x),
            Self::Norms(norms) => {
                norms.add(x);
                Ok(())
            }
        }
    }

    /// Returns the statistics of the inputs, unless there were none or all are zero.
    pub fn statistics(self, exec: &Exec<'_>) -> Result<Option<InputStatistics>, CalibrationError> {
        match self {
            Self::Hessian(hessian) => hessian.statistics(exec),
            Self::Norms(norms) => norms.statistics(),
        }
    }
}

/// Returns the zero Hessian of a linear layer with `cols` inputs.
pub(super) fn zeroed(cols: usize, basis: Basis) -> Result<Hessian, LoadError> {
    Hessian::zeroed(cols, basis).map_err(|AllocError { bytes }| LoadError::Memory {
        what: "calibration, for the Hessian of a linear layer's inputs,",
        needs: bytes,
        available: machine::available_memory(),
    })
}

/// A linear layer that is calibrated.
#[derive(Debug, Clone, Copy)]
pub(super) struct CalibratedSite {
    pub site: usize,
    /// Number of inputs.
    pub columns: usize,
    pub wanted: WantedInputs,
}

impl CalibratedSite {
    /// Returns the linear layer of a plan, if its matrix is packed with statistics of its inputs. A matrix that several
    /// layers use is packed for the inputs of the first.
    pub fn of(plan: &MatrixPlan<'_>) -> Option<Self> {
        let site = plan.site.filter(|_| !plan.is_again)?;
        Some(Self { site, columns: plan.columns, wanted: plan.wanted_inputs()? })
    }

    /// Returns the bytes that recording the inputs takes.
    pub fn recorded_bytes(&self) -> u64 {
        match self.wanted {
            WantedInputs::Hessian(_) => Hessian::bytes_for(self.columns).unwrap_or(u64::MAX),
            WantedInputs::Norms => self.columns as u64 * size_of::<f64>() as u64,
        }
    }
}

/// Lists the linear layers that are calibrated, without packing anything.
#[derive(Default)]
pub(super) struct CalibratedSites {
    /// Linear layers in the order of packing.
    pub linears: Vec<CalibratedSite>,
    /// Bytes of all matrices.
    pub bytes: u64,
    /// Bytes of the largest matrix in f32 that is pruned: one at a time is.
    pub pruned_bytes: u64,
    sites: Vec<Site>,
}

impl Packer for CalibratedSites {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        self.linears.extend(CalibratedSite::of(&plan));
        if plan.pruning.is_some() {
            let rows = plan.bands.iter().map(|(_, rows)| rows).sum();
            self.pruned_bytes = self.pruned_bytes.max(float_bytes(rows, plan.columns));
        }
        let size = plan.size();
        self.bytes = self.bytes.saturating_add(size.bytes);
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

/// Statistics of the inputs of a layer's linear layers. The layer runs when one is requested, and each run records as
/// many as memory has room for.
pub(super) struct LayerInputs<'a, 's> {
    pass: &'a mut Pass<'s>,
    /// The layer in f32.
    layer: &'a Layer,
    /// Index of the layer.
    index: usize,
    /// Linear layers that are not recorded yet; see [`CalibratedSites`].
    left: Vec<CalibratedSite>,
    recorded: BTreeMap<usize, Recorded>,
    /// Bytes that may be recorded at a time; the inputs of at least one are recorded.
    room: u64,
    /// Work that running the layer stands for; 0 after the first run.
    work: f64,
}

impl<'a, 's> LayerInputs<'a, 's> {
    pub fn new(
        pass: &'a mut Pass<'s>,
        layer: &'a Layer,
        index: usize,
        linears: Vec<CalibratedSite>,
        room: u64,
        work: f64,
    ) -> Self {
        Self { pass, layer, index, left: linears, recorded: BTreeMap::new(), room, work }
    }

    /// Runs the layer and records the first of the linear layers that are left.
    fn record(&mut self, work: &mut dyn FnMut(f64)) -> Result<(), LoadError> {
        let mut room = self.room;
        let mut recorder = Recorder::default();
        let fit = self.left.iter().enumerate().take_while(|(index, site)| {
            let bytes = site.recorded_bytes();
            let fits = bytes <= room || *index == 0;
            room = room.saturating_sub(bytes);
            fits
        });
        let count = fit.count();
        for site in self.left.drain(..count) {
            recorder.0.get_mut().insert(site.site, Recorded::new(&site)?);
        }
        let each = std::mem::take(&mut self.work) / self.pass.sequences() as f64;
        self.pass.observe(self.layer, self.index, &recorder, &mut || work(each))?;
        self.recorded.append(&mut recorder.0.into_inner());
        Ok(())
    }
}

impl Inputs for LayerInputs<'_, '_> {
    fn take(&mut self, site: usize, work: &mut dyn FnMut(f64)) -> Result<Option<Recorded>, LoadError> {
        if self.left.iter().any(|left| left.site == site) {
            self.record(work)?;
        }
        Ok(self.recorded.remove(&site))
    }
}

/// Records the inputs of some linear layers, by site number.
#[derive(Default)]
struct Recorder(RefCell<BTreeMap<usize, Recorded>>);

impl Observer for Recorder {
    fn see(&self, exec: &Exec<'_>, site: usize, x: &[f32]) -> Result<(), PoolError> {
        self.0.borrow_mut().get_mut(&site).map_or(Ok(()), |recorded| recorded.add(exec, x))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Format, PackedMatrix, Pool, RowSource};

    use super::super::in_memory;
    use super::*;
    use crate::quantization::Quantization;
    use crate::random::RandomMatrix;
    use crate::spec::ModelSpec;
    use crate::specs;
    use crate::weights::{Loader, Source};

    impl RowSource for RandomMatrix {
        fn read_row(&self, row: usize, out: &mut [f32]) {
            Self::read_row(self, row, out);
        }
    }

    #[test]
    fn hessians_do_not_depend_on_how_many_are_recorded_at_once() {
        let spec = ModelSpec::from_json(&specs::llama(96, 1).to_string()).unwrap();
        let (pool, cancel) = (Pool::new(NonZeroUsize::new(2).unwrap()), Cancel::new());
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        let load = |name| Loader::new(&spec, Source::Random, Quantization::named(name).unwrap());
        let (floats, mut wanted) = (load("f32"), CalibratedSites::default());
        load("int4").layer(&mut wanted, 0, &spec.layers[0], &[]).unwrap();
        assert_eq!(wanted.linears.iter().map(|linear| linear.columns).collect::<Vec<_>>(), [64, 64, 64, 96]);

        let sequences: Vec<Vec<u32>> = [200, 256, 17].map(|length| (0..length).map(|i| i * i % 96).collect()).into();
        let embedding = floats.embedding(&mut in_memory(exec, &mut |_, _| ())).unwrap();
        let layer = floats.layer(&mut in_memory(exec, &mut |_, _| ()), 0, &spec.layers[0], &[]).unwrap();
        let mut pass = Pass::new(exec, &spec, &sequences, &embedding, &[], None).unwrap();
        // All but the last, which is larger: its inputs are padded to 128.
        let three = Hessian::bytes_for(64).unwrap() + Hessian::bytes_for(96).unwrap();
        let found = [(u64::MAX, 3), (three, 6), (0, 12)].map(|(room, runs)| {
            let (mut done, mut advanced) = (0, 0.0);
            let mut inputs = LayerInputs::new(&mut pass, &layer, 0, wanted.linears.clone(), room, 100.0);
            let mut packed = Vec::new();
            for &CalibratedSite { site, columns, .. } in &wanted.linears {
                let work = &mut |bytes| (done, advanced) = (done + 1, advanced + bytes);
                let Recorded::Hessian(hessian) = inputs.take(site, work).unwrap().unwrap() else {
                    panic!("no Hessian")
                };
                assert_eq!(hessian.rows(), 473);
                let statistics = hessian.statistics(&exec).unwrap().unwrap();
                let rows = RandomMatrix::new("rows", 20);
                let matrix = PackedMatrix::pack_calibrated(&exec, &[(Format::Int4, 20)], columns, &rows, &statistics);
                packed.extend(matrix.unwrap().buffers().flatten().copied());
            }
            assert_eq!(done, runs, "sequences that ran");
            assert!((advanced - 100.0).abs() < 1e-9, "{advanced}");
            packed
        });
        assert!(found.iter().all(|packed| *packed == found[0]));
    }
}
