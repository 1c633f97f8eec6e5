//! Loading an adapter from its files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use ferrule_formats::{Checkpoint, FloatDtype, WeightTensor, nearest};
use ferrule_kernels::arch::Isa;
use ferrule_kernels::{Cancel, Exec, Format, Pool, machine};

use super::config::{AdapterConfig, names};
use super::error::{AdapterError, TensorError};
use super::names::{Half, layer_of, module_of, modules, unsupported};
use super::{Adapter, HeadsLowRank, LowRank, Updates};
use crate::limits::SpecError;
use crate::spec::{ModelSpec, PartSpec, TensorSpec};
use crate::weights::{HeadSplit, LoadError, MatrixPlan, Measure, Pack, Packer, Site, Stored, View};

/// PEFT's file name of the tensors.
const TENSORS: &str = "adapter_model.safetensors";
/// Names of the lm_head in checkpoints.
const LM_HEADS: [&str; 2] = ["lm_head", "embed_out"];
/// PEFT's file name of the configuration.
const CONFIG: &str = "adapter_config.json";

/// Loads adapters for one model; works while the model runs.
pub struct AdapterLoader {
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) sites: Arc<[Site]>,
    pub(crate) isa: Isa,
    pub(crate) pool: Arc<Pool>,
}

impl AdapterLoader {
    /// Packs the tensors of a directory, in the format in which they are stored.
    ///
    /// # Errors
    /// [`AdapterError`] if the adapter does not fit the model or the configuration, memory is too small, or the load is
    /// cancelled.
    pub fn load(&self, directory: &Path, config: &AdapterConfig, cancel: &Cancel) -> Result<Adapter, AdapterError> {
        let files = Checkpoint::open_single(directory, TENSORS).map_err(LoadError::from)?;
        let modules = Matching { model: self, files: &files, config, directory }.modules()?;
        let reading = Reading { model: self, files: &files, modules };
        let mut measure = Measure::default();
        reading.updates(&mut measure)?;
        let (total, available) = (measure.bytes, machine::available_memory());
        if total > available {
            return Err(LoadError::Memory { what: "the adapter", needs: total, available }.into());
        }
        let exec = Exec { isa: self.isa, pool: &self.pool, cancel };
        let (progress, sites) = (&mut |_, _| {}, Vec::new());
        let updates = reading.updates(&mut Pack { exec, done: 0, total, progress, sites })?;
        let rank = reading.modules.values().map(|module| module.rank).max().unwrap_or(0);
        let mut modules: Vec<_> = reading.modules.into_values().map(|module| module.name).collect();
        modules.sort_unstable();
        Ok(Adapter { fingerprint: updates.fingerprint(), updates, rank, modules })
    }

    /// Returns the tensors of a role in the base model.
    fn stored(&self, role: &str) -> Result<&TensorSpec, LoadError> {
        Ok(self.spec.tensor(&format!("{role}.weight"))?)
    }
}

/// A module of the model that an adapter changes.
struct Module {
    /// Name in the adapter.
    name: String,
    rank: usize,
    scale: f32,
}

/// Matches the tensors of an adapter with modules of the model.
struct Matching<'a> {
    model: &'a AdapterLoader,
    files: &'a Checkpoint,
    config: &'a AdapterConfig,
    directory: &'a Path,
}

impl Matching<'_> {
    /// Returns the modules, by tensor name of the base model. Checks that each tensor of the file belongs to one, and
    /// that each target has tensors.
    fn modules(&self) -> Result<BTreeMap<String, Module>, AdapterError> {
        self.check_targets()?;
        let mut given = self.given()?;
        let mut found = BTreeMap::new();
        for (role, _) in self.model.sites.iter().flat_map(|site| &site.parts) {
            for tensor in &self.model.stored(role)?.names {
                let names = modules(&self.model.spec, tensor);
                let Some(usual) = names.first() else { continue };
                // A tensor that several roles share is found once per role.
                if found.contains_key(tensor) {
                    continue;
                }
                let name = names.iter().find(|name| given.contains(*name)).unwrap_or(usual);
                let is_given = given.remove(name);
                let error = |error| self.error(Half::A.tensor_of(name), error);
                match (unsupported(role), self.config.targets(name, layer_of(role))) {
                    (Some(what), _) if is_given => return Err(error(TensorError::Unsupported { what })),
                    (None, Some(true)) if !is_given => return Err(error(TensorError::Missing)),
                    (None, Some(false)) if is_given => return Err(error(TensorError::NoTarget)),
                    _ if !is_given => continue,
                    _ => {}
                }
                found.insert(tensor.clone(), self.module(name)?);
            }
        }
        match given.first() {
            Some(name) if self.is_tied_lm_head(name) => Err(self.tied_lm_head(name)),
            Some(name) => {
                let known = self.known_modules();
                let nearest = nearest(name, known.iter().map(String::as_str)).map(str::to_owned);
                Err(self.error(Half::A.tensor_of(name), TensorError::NoModule { nearest }))
            }
            None if found.is_empty() => Err(AdapterError::Empty { file: self.files.listing().to_owned() }),
            None => Ok(found),
        }
    }

    fn module(&self, name: &str) -> Result<Module, AdapterError> {
        let (rank, factor) = self.config.rank_and_scale(name);
        let (name, scale) = (name.to_owned(), factor as f32);
        if !scale.is_finite() {
            return Err(AdapterError::Scale { file: self.directory.join(CONFIG), module: name, factor });
        }
        Ok(Module { name, rank, scale })
    }

    /// Returns the names of the modules in the file; each must have both matrices.
    fn given(&self) -> Result<BTreeSet<String>, AdapterError> {
        let mut given: BTreeMap<&str, Vec<Half>> = BTreeMap::new();
        for tensor in self.files.names() {
            let (module, half) = module_of(tensor).map_err(|error| self.error(tensor.to_owned(), error))?;
            given.entry(module).or_default().push(half);
        }
        for (module, halves) in &given {
            if let Some(half) = [Half::A, Half::B].into_iter().find(|half| !halves.contains(half)) {
                return Err(self.error(half.tensor_of(module), TensorError::Alone));
            }
        }
        Ok(given.into_keys().map(str::to_owned).collect())
    }

    /// Checks that each target names a module of the model.
    fn check_targets(&self) -> Result<(), AdapterError> {
        let Some(targets) = &self.config.targets else { return Ok(()) };
        let known = self.known_modules();
        let is_missing = |target: &&String| !known.iter().any(|module| names(target, module));
        let Some(target) = targets.iter().find(is_missing) else { return Ok(()) };
        if self.is_tied_lm_head(target) {
            return Err(self.tied_lm_head(target));
        }
        let ends = known.iter().filter_map(|module| module.rsplit('.').next());
        Err(AdapterError::Target {
            file: self.directory.join(CONFIG),
            target: target.clone(),
            nearest: nearest(target, ends).map(str::to_owned),
        })
    }

    /// Returns whether a name is that of a tied lm_head, for which the base model has no tensor.
    fn is_tied_lm_head(&self, name: &str) -> bool {
        self.model.spec.lm_head.is_some_and(|lm_head| lm_head.tied)
            && LM_HEADS.iter().any(|lm_head| names(lm_head, name))
    }

    fn tied_lm_head(&self, name: &str) -> AdapterError {
        let what = "an lm_head that is tied to the embedding";
        self.error(Half::A.tensor_of(name), TensorError::Unsupported { what })
    }

    fn known_modules(&self) -> Vec<String> {
        let tensors = self.model.spec.tensors.values().flat_map(|tensor| &tensor.names);
        tensors.flat_map(|tensor| modules(&self.model.spec, tensor)).collect()
    }

    fn error(&self, tensor: String, error: TensorError) -> AdapterError {
        AdapterError::Tensor { file: self.files.listing().to_owned(), tensor, error }
    }
}

/// Reads the matrices of matched modules.
struct Reading<'a> {
    model: &'a AdapterLoader,
    files: &'a Checkpoint,
    /// Modules by tensor name of the base model.
    modules: BTreeMap<String, Module>,
}

/// Consecutive outputs of a linear layer that one module adds to.
struct Outputs<'a> {
    module: &'a Module,
    first: usize,
    rows: usize,
    views: Vec<View<'a>>,
}

impl Reading<'_> {
    fn updates<P: Packer>(&self, packer: &mut P) -> Result<Updates<P::Matrix>, AdapterError> {
        let mut updates = Updates { linear: BTreeMap::new(), heads: BTreeMap::new() };
        for (number, site) in self.model.sites.iter().enumerate() {
            let mut all = Vec::new();
            for outputs in self.outputs(site)? {
                let a = self.a(outputs.module, site.columns)?;
                match site.heads {
                    None => all.push(low_rank(packer, a, site.columns, outputs)?),
                    Some(split) => {
                        updates.heads.insert(number, heads_low_rank(packer, &a, site, split, &outputs)?);
                    }
                }
            }
            if !all.is_empty() {
                updates.linear.insert(number, all);
            }
        }
        Ok(updates)
    }

    /// Returns the outputs of a linear layer that the adapter changes. Neighbours of one module stay together, so that
    /// their common input is multiplied once.
    fn outputs(&self, site: &Site) -> Result<Vec<Outputs<'_>>, AdapterError> {
        let mut all: Vec<Outputs<'_>> = Vec::new();
        let mut first = 0;
        for (role, rows) in &site.parts {
            let place = self.model.stored(role)?;
            let rows = rows / place.names.len();
            for tensor in &place.names {
                if let Some(module) = self.modules.get(tensor) {
                    let view = self.b(module, rows, place.part)?;
                    match all.last_mut() {
                        Some(last) if last.module.name == module.name && last.first + last.rows == first => {
                            last.rows += rows;
                            last.views.push(view);
                        }
                        _ => all.push(Outputs { module, first, rows, views: vec![view] }),
                    }
                }
                first += rows;
            }
        }
        Ok(all)
    }

    fn a(&self, module: &Module, columns: usize) -> Result<View<'_>, AdapterError> {
        let tensor = self.tensor(module, Half::A)?;
        let expected = [module.rank, columns];
        View::of_rows(self.files, &tensor, module.rank, None, columns)
            .ok_or_else(|| self.misshapen(&tensor, expected, "rank, inputs"))
    }

    fn b(&self, module: &Module, rows: usize, part: Option<PartSpec>) -> Result<View<'_>, AdapterError> {
        let tensor = self.tensor(module, Half::B)?;
        let expected = [part.map_or(rows, |part| part.stored_rows(rows)), module.rank];
        View::of_rows(self.files, &tensor, rows, part, module.rank)
            .ok_or_else(|| self.misshapen(&tensor, expected, "outputs, rank"))
    }

    fn tensor(&self, module: &Module, half: Half) -> Result<WeightTensor<'_>, AdapterError> {
        Ok(self.files.weight(&half.tensor_of(&module.name)).map_err(LoadError::from)?)
    }

    fn misshapen(&self, tensor: &WeightTensor<'_>, expected: [usize; 2], what: &'static str) -> AdapterError {
        AdapterError::Tensor {
            file: self.files.listing().to_owned(),
            tensor: tensor.name().to_owned(),
            error: TensorError::Shape { found: tensor.shape().to_vec(), expected: expected.to_vec(), what },
        }
    }
}

fn low_rank<P: Packer>(
    packer: &mut P,
    a: View<'_>,
    columns: usize,
    outputs: Outputs<'_>,
) -> Result<LowRank<P::Matrix>, LoadError> {
    let Outputs { module, first, views, .. } = outputs;
    Ok(LowRank {
        a: packer.pack(plan(vec![a], columns))?,
        b: packer.pack(plan(views, module.rank))?,
        first_output: first,
        scale: module.scale,
    })
}

fn heads_low_rank<P: Packer>(
    packer: &mut P,
    a: &View<'_>,
    site: &Site,
    split: HeadSplit,
    outputs: &Outputs<'_>,
) -> Result<HeadsLowRank<P::Matrix>, LoadError> {
    let (Outputs { module, views, .. }, columns) = (outputs, site.columns);
    let [b] = views.as_slice() else { return Err(SpecError::not_whole(&site.parts[0].0).into()) };
    if !b.is_plain() {
        return Err(SpecError::not_whole(&site.parts[0].0).into());
    }
    let (mut keys, mut values) = (Vec::with_capacity(split.heads), Vec::with_capacity(split.heads));
    for head in 0..split.heads {
        let first = head * split.rows();
        let of_keys = b.slice(first, split.nope_dim).transposed(module.rank);
        keys.push(packer.pack(plan(vec![of_keys], split.nope_dim))?);
        let of_values = b.slice(first + split.nope_dim, split.value_dim);
        values.push(packer.pack(plan(vec![of_values], module.rank))?);
    }
    Ok(HeadsLowRank {
        a: packer.pack(plan(vec![a.clone()], columns))?,
        a_transposed: packer.pack(plan(vec![a.transposed(columns)], module.rank))?,
        keys,
        values,
        scale: module.scale,
    })
}

/// Plans a matrix of views of one tensor, in its stored format or, if that is quantized, in f32.
fn plan(views: Vec<View<'_>>, columns: usize) -> MatrixPlan<'_> {
    let with_format = views.into_iter().map(|view| {
        let format = format_of(view.tensor());
        (Stored::View(view), format)
    });
    MatrixPlan::new(String::new(), with_format.collect(), columns)
}

fn format_of(tensor: &WeightTensor<'_>) -> Format {
    match tensor.float_dtype() {
        Some(FloatDtype::F16) => Format::F16,
        Some(FloatDtype::Bf16) => Format::Bf16,
        Some(FloatDtype::F32) | None => Format::F32,
    }
}
