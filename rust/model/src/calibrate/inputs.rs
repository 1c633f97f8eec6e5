//! Recording the inputs of a layer's linear layers while it runs.

use std::collections::{BTreeMap, BTreeSet};

use ferrule_kernels::arch::LANES;
use ferrule_kernels::{
    AllocError, Basis, CalibrationError, Exec, Hessian, InputNorms, InputStatistics, PackError, PackedMatrix,
    PoolError, machine,
};

use super::float_bytes;
use super::pass::{Exact, Pass, State};
use super::recorder::Recorder;
use crate::pruning::WantedInputs;
use crate::weights::{Layer, LoadError, MatrixPlan, MatrixSize, Packer, Site};

/// Provides what was recorded of the inputs of linear layers.
pub(super) trait Inputs {
    /// Returns what was recorded of linear layer `site`, which is packed next. Calls `work` with the work that was done for
    /// it, in bytes of packed matrices.
    fn take(&mut self, site: usize, work: &mut dyn FnMut(f64)) -> Result<Option<Recorded>, LoadError>;

    /// Receives the packed matrix of linear layer `site`.
    fn packed(&mut self, _site: usize, _matrix: &PackedMatrix) -> Result<(), LoadError> {
        Ok(())
    }
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
    pub fn new(site: &CalibratedSite) -> Result<Self, LoadError> {
        Ok(match site.wanted {
            WantedInputs::Hessian(basis) => {
                let hessian = zeroed(site.columns, basis)?;
                Self::Hessian(match site.corrects {
                    true => hessian.with_errors(site.outputs).map_err(too_large)?,
                    false => hessian,
                })
            }
            WantedInputs::Norms => Self::Norms(InputNorms::zeroed(site.columns)),
        })
    }

    /// Adds the rows of `x: [rows, columns]`.
    pub fn add(&mut self, exec: &Exec<'_>, x: &[f32]) -> Result<(), PoolError> {
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
    Hessian::zeroed(cols, basis).map_err(too_large)
}

fn too_large(AllocError { bytes }: AllocError) -> LoadError {
    LoadError::Memory {
        what: "calibration, for the Hessian of a linear layer's inputs,",
        needs: bytes,
        available: machine::available_memory(),
    }
}

/// A linear layer that is calibrated.
#[derive(Debug, Clone, Copy)]
pub(super) struct CalibratedSite {
    pub site: usize,
    /// Number of inputs.
    pub columns: usize,
    /// Number of outputs.
    pub outputs: usize,
    pub wanted: WantedInputs,
    /// Whether the packed matrix computes the inputs of the linear layers that are packed after it.
    pub is_replaced: bool,
    /// Whether the weights are corrected for the errors of the inputs.
    pub corrects: bool,
}

impl CalibratedSite {
    /// Returns the linear layer of a plan, if its matrix is packed with statistics of its inputs. A matrix that several
    /// layers use is packed for the inputs of the first.
    ///
    /// `correction_tokens` is the number of calibration tokens, if matrices are corrected for the errors of others. Those of
    /// routed experts are not, because the router of the exact model may choose others; and fewer tokens than inputs
    /// correct nothing.
    pub fn of(plan: &MatrixPlan<'_>, correction_tokens: Option<usize>) -> Option<Self> {
        let site = plan.site.filter(|_| !plan.is_again)?;
        let (wanted, columns) = (plan.wanted_inputs()?, plan.columns);
        let outputs = plan.bands.iter().map(|(_, rows)| rows).sum();
        let is_replaced = correction_tokens.is_some() && !plan.name.contains(".experts.");
        let has_tokens = correction_tokens.is_some_and(|tokens| tokens >= columns);
        // Stored formats are not calibrated.
        let is_rotated = wanted == WantedInputs::Hessian(Basis::Rotated)
            && plan.bands.iter().all(|(format, _)| format.stored_block().is_none());
        let corrects = is_replaced && has_tokens && is_rotated;
        Some(Self { site, columns, outputs, wanted, is_replaced, corrects })
    }

    /// Returns the bytes that recording the inputs takes.
    pub fn recorded_bytes(&self) -> u64 {
        let of_errors = match self.corrects {
            true => Hessian::bytes_of_errors(self.columns, self.outputs).unwrap_or(u64::MAX),
            false => 0,
        };
        let bytes = match self.wanted {
            WantedInputs::Hessian(_) => Hessian::bytes_for(self.columns).unwrap_or(u64::MAX),
            WantedInputs::Norms => self.columns as u64 * size_of::<f64>() as u64,
        };
        bytes.saturating_add(of_errors)
    }
}

/// Lists the linear layers that are calibrated, without packing anything.
#[derive(Default)]
pub(super) struct CalibratedSites {
    /// Number of calibration tokens, if matrices are corrected for the errors of others.
    pub correction_tokens: Option<usize>,
    /// Linear layers in the order of packing.
    pub linears: Vec<CalibratedSite>,
    /// Bytes of all matrices.
    pub bytes: u64,
    /// Bytes of the matrices that replace those in full precision.
    pub replaced_bytes: u64,
    /// Bytes of the largest matrix in f32 that is pruned: one at a time is.
    pub pruned_bytes: u64,
    sites: Vec<Site>,
}

impl CalibratedSites {
    pub fn new(correction_tokens: Option<usize>) -> Self {
        Self { correction_tokens, ..Self::default() }
    }
}

impl Packer for CalibratedSites {
    type Matrix = MatrixSize;

    fn pack(&mut self, plan: MatrixPlan<'_>) -> Result<MatrixSize, LoadError> {
        let size = plan.size();
        if let Some(site) = CalibratedSite::of(&plan, self.correction_tokens) {
            self.linears.push(site);
            self.replaced_bytes = self.replaced_bytes.saturating_add(if site.is_replaced { size.bytes } else { 0 });
        }
        if plan.pruning.is_some() {
            let rows = plan.bands.iter().map(|(_, rows)| rows).sum();
            self.pruned_bytes = self.pruned_bytes.max(float_bytes(rows, plan.columns));
        }
        self.bytes = self.bytes.saturating_add(size.bytes);
        Ok(size)
    }

    fn sites(&mut self) -> &mut Vec<Site> {
        &mut self.sites
    }
}

/// Statistics of the inputs of a layer's linear layers. The layer runs when one is requested that is not recorded. A
/// run records as many as memory has room for, up to the first whose packed matrix computes the inputs of those after
/// it.
pub(super) struct LayerInputs<'a, 's> {
    pass: &'a mut Pass<'s>,
    /// Hidden states of the exact model before the layer, if matrices are corrected.
    exact: Option<&'a mut State>,
    /// The layer in full precision.
    layer: &'a Layer,
    /// Index of the layer.
    index: usize,
    /// Linear layers that are not recorded yet; see [`CalibratedSites`].
    left: Vec<CalibratedSite>,
    recorded: BTreeMap<usize, Recorded>,
    /// Linear layers whose packed matrices compute the inputs of those after them.
    replaceable: BTreeSet<usize>,
    /// Packed matrices that compute the inputs of the linear layers that are left, by site.
    replaced: BTreeMap<usize, PackedMatrix>,
    /// Bytes that may be recorded at a time; the inputs of at least one are recorded.
    room: u64,
    /// Work that recording one linear layer stands for.
    work: f64,
    /// Whether `exact` has the hidden states after the layer.
    is_advanced: bool,
}

impl<'a, 's> LayerInputs<'a, 's> {
    /// Begins a layer. `work` is the work that recording all linear layers stands for.
    pub fn new(
        (pass, exact): (&'a mut Pass<'s>, Option<&'a mut State>),
        (layer, index): (&'a Layer, usize),
        linears: Vec<CalibratedSite>,
        room: u64,
        work: f64,
    ) -> Self {
        let work = work / linears.len() as f64;
        let replaceable = linears.iter().filter(|linear| linear.is_replaced).map(|linear| linear.site).collect();
        Self {
            pass,
            exact,
            layer,
            index,
            left: linears,
            recorded: BTreeMap::new(),
            replaceable,
            replaced: BTreeMap::new(),
            room,
            work,
            is_advanced: false,
        }
    }

    /// Runs the layer and records the first of the linear layers that are left.
    fn record(&mut self, work: &mut dyn FnMut(f64)) -> Result<(), LoadError> {
        let (mut room, mut is_last) = (self.room, false);
        let fit = self.left.iter().enumerate().take_while(|(index, site)| {
            let bytes = site.recorded_bytes();
            let fits = *index == 0 || (bytes <= room && !is_last);
            room = room.saturating_sub(bytes);
            is_last = site.is_replaced;
            fits
        });
        let count = fit.count();
        let now: Vec<_> = self.left.drain(..count).collect();
        let recorder = Recorder::new(&now, &self.replaced)?;
        let corrects = now.iter().any(|site| site.corrects);
        // The last run of the exact model goes through the whole layer.
        self.is_advanced |= corrects && self.left.is_empty();
        let exact = self.exact.as_deref_mut().filter(|_| corrects);
        let exact = exact.map(|state| Exact { state, advances: self.is_advanced });
        let each = count as f64 * self.work / self.pass.sequences() as f64;
        self.pass.observe((self.layer, self.index), exact, &recorder, &mut || work(each))?;
        self.recorded.append(&mut recorder.recorded());
        Ok(())
    }

    /// Runs the exact model through the layer, unless it did already.
    pub fn finish(self) -> Result<(), LoadError> {
        let Self { pass, exact, layer, index, is_advanced: false, .. } = self else { return Ok(()) };
        exact.map_or(Ok(()), |exact| pass.advance_exact(exact, layer, index))
    }
}

impl Inputs for LayerInputs<'_, '_> {
    fn take(&mut self, site: usize, work: &mut dyn FnMut(f64)) -> Result<Option<Recorded>, LoadError> {
        if self.left.iter().any(|left| left.site == site) {
            self.record(work)?;
        }
        Ok(self.recorded.remove(&site))
    }

    fn packed(&mut self, site: usize, matrix: &PackedMatrix) -> Result<(), LoadError> {
        if self.replaceable.contains(&site) && !self.left.is_empty() {
            let copy = matrix.panels(0..matrix.rows().div_ceil(LANES)).map_err(PackError::Memory)?;
            self.replaced.insert(site, copy);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Format, Pool, RowSource};

    use super::super::in_memory;
    use super::super::output::Calibrated;
    use super::super::pass::Hidden;
    use super::super::tests::Packed;
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
            let mut inputs = LayerInputs::new((&mut pass, None), (&layer, 0), wanted.linears.clone(), room, 100.0);
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

    fn hidden_of(pass: &Pass<'_>) -> Vec<f32> {
        pass.state.hidden.clone().into_f32()
    }

    /// Calls `test` with a layer in f32 and sequences before it, in the exact model and in another, and with the linear
    /// layers that are calibrated.
    fn with_layer(test: impl FnOnce(&ModelSpec, Exec<'_>, &Layer, [&mut Pass<'_>; 2], Vec<CalibratedSite>)) {
        let spec = ModelSpec::from_json(&specs::llama(96, 1).to_string()).unwrap();
        let (pool, cancel) = (Pool::new(NonZeroUsize::new(2).unwrap()), Cancel::new());
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        let load = |name| Loader::new(&spec, Source::Random, Quantization::named(name).unwrap());
        // Many tokens for each input, so that corrections shrink little.
        let lengths = std::iter::once(17).chain([256; 32]);
        let sequences: Vec<Vec<u32>> = lengths
            .enumerate()
            .map(|(first, length)| (first..first + length).map(|i| (i * i % 96) as u32).collect())
            .collect();
        let (floats, mut wanted) = (load("f32"), CalibratedSites::new(Some(17 + 32 * 256)));
        load("int8").layer(&mut wanted, 0, &spec.layers[0], &[]).unwrap();
        let embedding = floats.embedding(&mut in_memory(exec, &mut |_, _| ())).unwrap();
        let layer = floats.layer(&mut in_memory(exec, &mut |_, _| ()), 0, &spec.layers[0], &[]).unwrap();
        let pass = || Pass::new(exec, &spec, &sequences, &embedding, &[], None).unwrap();
        let (mut exact, mut other) = (pass(), pass());
        let mut changed = hidden_of(&other);
        changed.iter_mut().step_by(4).for_each(|x| *x *= 0.6);
        other.state.hidden = Hidden::F32(changed);
        exact.state.hidden.narrow();
        test(&spec, exec, &layer, [&mut exact, &mut other], wanted.linears);
    }

    #[test]
    fn corrected_matrices_compute_what_the_exact_model_does() {
        with_layer(|spec, exec, layer, [exact, other], linears| {
            assert!(linears.iter().all(|linear| linear.is_replaced && linear.corrects));
            let before = [&*exact, &*other].map(|pass| pass.state.hidden.clone());
            let plain: Vec<_> = linears.iter().map(|linear| CalibratedSite { corrects: false, ..*linear }).collect();
            let errors = [plain, linears].map(|linears| {
                (exact.state.hidden, other.state.hidden) = before.clone().into();
                let mut inputs =
                    LayerInputs::new((&mut *other, Some(&mut exact.state)), (layer, 0), linears, u64::MAX, 1.0);
                let loader = Loader::new(spec, Source::Random, Quantization::named("int8").unwrap());
                let mut target = Packed::default();
                let mut packer = Calibrated::new(exec, &mut target, &mut inputs);
                let packed = loader.layer(&mut packer, 0, &spec.layers[0], &[]).unwrap();
                inputs.finish().unwrap();
                assert!(target.matrices.iter().all(|(_, has_statistics)| *has_statistics), "{:?}", target.matrices);
                assert!(other.state.hidden == before[1], "hidden states before the layer");
                other.advance(&packed, 0, &mut || ()).unwrap();
                let changes = [&*exact, &*other].map(hidden_of);
                let changes = changes.iter().zip(&before).map(|(after, before)| {
                    after
                        .iter()
                        .zip(before.clone().into_f32())
                        .map(|(after, before)| after - before)
                        .collect::<Vec<_>>()
                });
                let changes: Vec<_> = changes.collect();
                changes[0].iter().zip(&changes[1]).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
            });
            assert!(errors[1] < 0.1 * errors[0], "{errors:?}");
            let after = exact.state.hidden.clone();
            exact.state.hidden.clone_from(&before[0]);
            exact.advance(layer, 0, &mut || ()).unwrap();
            assert!(exact.state.hidden == after, "hidden states of the exact model");
        });
    }

    #[test]
    fn packed_matrices_compute_the_inputs_of_those_after_them() {
        struct Zeros;

        impl RowSource for Zeros {
            fn read_row(&self, _row: usize, out: &mut [f32]) {
                out.fill(0.0);
            }
        }

        with_layer(|_, exec, layer, [exact, other], linears| {
            let (first, second) = (linears[0], linears[1]);
            for zeros in [false, true] {
                let mut inputs =
                    LayerInputs::new((&mut *other, Some(&mut exact.state)), (layer, 0), linears.clone(), u64::MAX, 1.0);
                let has_inputs = |site, inputs: &mut LayerInputs<'_, '_>| {
                    let recorded = inputs.take(site, &mut |_| ()).unwrap().unwrap();
                    recorded.statistics(&exec).unwrap().is_some()
                };
                assert!(has_inputs(first.site, &mut inputs));
                if zeros {
                    // Without values the attention has no outputs.
                    let bands = [(Format::Int4, first.outputs)];
                    let matrix = PackedMatrix::pack(&exec, &bands, first.columns, &Zeros).unwrap();
                    inputs.packed(first.site, &matrix).unwrap();
                }
                assert_eq!(has_inputs(second.site, &mut inputs), !zeros);
            }
        });
    }
}
