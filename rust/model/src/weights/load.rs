//! How a model's weights come out of a checkpoint.

use std::cell::RefCell;
use std::path::PathBuf;

use ferrule_formats::{Checkpoint, CheckpointError, PackedError};
use ferrule_kernels::{AllocError, Exec, Format, PackError, PoolError, RowSource, machine};

use super::packed;
use super::plan::{MatrixPlan, Measure, Pack, Packer};
use super::sites::{HeadSplit, Site};
use super::sizes::{MatrixSize, WeightSizes};
use super::stored::{Source, Stored, View};
use super::{
    Attention, Classifier, Dense, Embedding, Experts, Ffn, Heads, Latent, Layer, Linear, Norm, Projections, Weights,
};
use crate::limits::SpecError;
use crate::quantization::Quantization;
use crate::random::RandomMatrix;
use crate::spec::{
    AttentionSpec, DenseSpec, ExpertsSpec, FfnSpec, HeadNormSpec, HeadProjections, LatentProjections, LayerSpec,
    ModelSpec, NormSpec, NormedOver, PositionsSpec, ProjectionsSpec,
};

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The description cannot be.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The files cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A packed file cannot be read or written.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// A tensor's shape is not what the config says.
    #[error("tensor {tensor:?} has the shape {found:?}; the config asks for {expected:?} ({role})")]
    Shape {
        /// Its name in the checkpoint.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// What the config asks for.
        expected: Vec<usize>,
        /// What it is for.
        role: String,
    },
    /// What goes into a matrix as the calibration's text runs is not finite.
    #[error("calibration: an input of {role} is not a finite number")]
    NotFinite {
        /// The roles of its rows.
        role: String,
    },
    /// More than the machine or the container has.
    #[error("{what} needs {needs} bytes; {available} bytes are available here")]
    Memory {
        /// What was to be allocated.
        what: &'static str,
        /// Bytes needed.
        needs: u64,
        /// Bytes that the machine and the container have left.
        available: u64,
    },
    /// As [`LoadError::Memory`], of weights that could be read as they are needed.
    #[error(
        "the model needs {needs} bytes for its packed weights; {available} bytes are available here (with allow_paging \
         they are read from a packed file again and again, slowly)"
    )]
    Weights {
        /// Bytes needed.
        needs: u64,
        /// Bytes that the machine and the container have left.
        available: u64,
    },
    /// A packed file is of another quantization.
    #[error("{}: is packed as {packed:?}, where {asked:?} is asked for", file.display())]
    PackedAs {
        /// The file.
        file: PathBuf,
        /// What its metadata says.
        packed: String,
        /// What it was to be loaded as.
        asked: &'static str,
    },
    /// Weights that are packed were to be packed once more.
    #[error("{}: is packed already; pack the checkpoint that it was made of", file.display())]
    PackedAlready {
        /// The file.
        file: PathBuf,
    },
    /// The load was cancelled.
    #[error("the load was cancelled")]
    Cancelled,
    /// A defect of ferrule.
    #[error("a worker panicked while packing weights: {0}")]
    Panicked(String),
}

impl LoadError {
    /// Of a matrix whose bytes cannot be counted.
    pub(crate) fn too_large() -> Self {
        PackError::Memory(AllocError { bytes: u64::MAX }).into()
    }
}

impl From<AllocError> for LoadError {
    fn from(error: AllocError) -> Self {
        PackError::Memory(error).into()
    }
}

impl From<PoolError> for LoadError {
    fn from(error: PoolError) -> Self {
        PackError::Pool(error).into()
    }
}

impl From<PackError> for LoadError {
    fn from(error: PackError) -> Self {
        match error {
            PackError::Pool(PoolError::Cancelled) => Self::Cancelled,
            PackError::Pool(PoolError::Panicked(message)) => Self::Panicked(message),
            PackError::Memory(AllocError { bytes }) => {
                Self::Memory { what: "a packed matrix", needs: bytes, available: machine::available_memory() }
            }
        }
    }
}

/// Told how many bytes of the packed weights are done, of how many.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Reads the roles of a spec out of a source.
#[derive(Clone, Copy)]
pub(crate) struct Loader<'a> {
    spec: &'a ModelSpec,
    source: Source<'a>,
    /// The formats to pack in.
    quantization: Quantization,
    /// Whether vectors are read; else they are as long, and checked, but nothing of the files is touched.
    reads: bool,
    /// Gets each vector that is read, with its role.
    vectors: Option<&'a RefCell<Vectors>>,
}

/// What a head of latent attention has of the one stored matrix.
struct HeadRows<'a> {
    /// `[kv_rank, nope_dim]`
    keys: Stored<'a>,
    /// `[value_dim, kv_rank]`
    values: Stored<'a>,
}

/// Vectors with their roles.
pub(super) type Vectors = Vec<(String, Vec<f32>)>;

/// A matrix's part: its role, its rows and its format.
type RolePart<'r> = (&'r str, usize, Format);

/// A head, or the bias of a head that is the embedding.
type HeadOrBias<M> = (Option<Linear<M>>, Option<Vec<f32>>);

impl<'a> Loader<'a> {
    pub fn new(spec: &'a ModelSpec, source: Source<'a>, quantization: Quantization) -> Self {
        Self { spec, source, quantization, reads: true, vectors: None }
    }

    /// Packs all weights, tensor by tensor; the source's pages are given back after each.
    ///
    /// # Errors
    /// [`LoadError`], before anything large is allocated where a file or the memory is at fault.
    pub fn load(&self, exec: Exec<'_>, progress: Progress<'_>) -> Result<Weights, LoadError> {
        let WeightSizes { weight_bytes: total, .. } = self.measure()?.sizes(self.spec);
        let (available, may_page) = match self.source {
            Source::Packed { file, may_page } if file.is_mapped() => (machine::memory_for_files(), may_page),
            _ => (machine::available_memory(), false),
        };
        if total > available && !may_page {
            return Err(LoadError::Weights { needs: total, available });
        }
        self.weights(&mut Pack { exec, source: self.source, done: 0, total, progress, sites: Vec::new() })
    }

    /// The sizes of all weights, from the headers of the files alone.
    ///
    /// # Errors
    /// [`LoadError`] where a tensor is missing or is not what the spec says.
    pub fn measure(&self) -> Result<Weights<MatrixSize>, LoadError> {
        self.without_vectors().weights(&mut Measure::default())
    }

    /// The same, but that vectors are as long only.
    pub fn without_vectors(&self) -> Self {
        Self { reads: false, ..*self }
    }

    /// The same, but that each vector that is read is noted too, with its role.
    pub fn noting(&self, vectors: &'a RefCell<Vectors>) -> Self {
        Self { vectors: Some(vectors), ..*self }
    }

    /// All weights as the packer makes them.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn weights<P: Packer>(&self, packer: &mut P) -> Result<Weights<P::Matrix>, LoadError> {
        let embedding = self.embedding(packer)?;
        let layers = self.spec.layers.iter().enumerate();
        let layers = layers.map(|(index, layer)| self.layer(packer, index, layer)).collect::<Result<_, _>>()?;
        let head_projection = self.head_projection(packer)?;
        let (head, tied_head_bias) = self.head(packer)?;
        let final_norm = self.final_norm()?;
        let classifier = self.classifier(packer)?;
        let text_projections = self.text_projections(packer)?;
        let sites = std::mem::take(packer.sites());
        Ok(Weights {
            embedding,
            layers,
            final_norm,
            head_projection,
            head,
            tied_head_bias,
            classifier,
            text_projections,
            sites,
        })
    }

    /// From `hidden_size` to the width of the head's rows.
    pub fn head_projection<P: Packer>(&self, packer: &mut P) -> Result<Option<Linear<P::Matrix>>, LoadError> {
        let Self { spec, quantization, .. } = self;
        if spec.head.is_none() || spec.embedding.width.is_none() {
            return Ok(None);
        }
        let part = [("head_projection", spec.embedding_width(), quantization.ends())];
        self.linear(packer, "", &part, spec.hidden_size, false).map(Some)
    }

    /// A head of its own, or the bias of one that is the embedding.
    pub fn head<P: Packer>(&self, packer: &mut P) -> Result<HeadOrBias<P::Matrix>, LoadError> {
        let Self { spec, quantization, .. } = self;
        Ok(match spec.head {
            Some(head) if !head.tied => {
                let part = [("head", spec.vocab_size, quantization.ends())];
                (Some(self.linear(packer, "", &part, spec.embedding_width(), head.bias)?), None)
            }
            Some(head) if head.bias => (None, Some(self.vector("head.bias", spec.vocab_size)?)),
            _ => (None, None),
        })
    }

    /// After the last layer.
    pub fn final_norm(&self) -> Result<Option<Norm>, LoadError> {
        self.norm("final_norm", self.spec.final_norm, self.spec.hidden_size)
    }

    /// In f32, as are the text's projections: they are small, and run once for a text.
    pub fn classifier<P: Packer>(&self, packer: &mut P) -> Result<Option<Classifier<P::Matrix>>, LoadError> {
        let Some(spec) = self.spec.classifier else { return Ok(None) };
        let hidden = self.spec.hidden_size;
        let dense = match spec.activation {
            Some(_) => {
                Some(self.linear(packer, "classifier.", &[("dense", hidden, Format::F32)], hidden, spec.dense_bias)?)
            }
            None => None,
        };
        let norm = self.norm("classifier.norm", spec.norm, hidden)?;
        let labels = self.linear(packer, "", &[("classifier", spec.labels, Format::F32)], hidden, spec.bias)?;
        Ok(Some(Classifier { dense, norm, labels }))
    }

    /// In f32.
    pub fn text_projections<P: Packer>(&self, packer: &mut P) -> Result<Vec<Linear<P::Matrix>>, LoadError> {
        let mut columns = self.spec.hidden_size;
        let mut projections = Vec::new();
        for (i, spec) in self.spec.text_projections.iter().enumerate() {
            let role = i.to_string();
            let part = [(role.as_str(), spec.width, Format::F32)];
            projections.push(self.linear(packer, "text_projections.", &part, columns, spec.bias)?);
            columns = spec.width;
        }
        Ok(projections)
    }

    /// Where hidden states begin.
    pub fn embedding<P: Packer>(&self, packer: &mut P) -> Result<Embedding<P::Matrix>, LoadError> {
        let Self { spec, quantization, .. } = self;
        let (hidden, width, ends) = (spec.hidden_size, spec.embedding_width(), quantization.ends());
        let embedding = &spec.embedding;
        let tokens = match (spec.head, self.source) {
            (Some(head), _) if head.tied => ends,
            (_, Source::Packed { file, .. }) => packed::first_format(file, "embedding").unwrap_or(ends),
            _ => quantization.of_rows(&self.stored("embedding.weight", spec.vocab_size, Some(width))?[0]),
        };
        let tokens = self.linear(packer, "", &[("embedding", spec.vocab_size, tokens)], width, false)?.weight;
        let projection = match embedding.width {
            Some(width) => Some(self.linear(packer, "", &[("embedding_projection", hidden, ends)], width, false)?),
            None => None,
        };
        let positions = match embedding.positions {
            Some(PositionsSpec::Learned { rows, .. }) => Some(self.table("positions.weight", rows)?),
            Some(PositionsSpec::Sinusoidal { offset }) => {
                let rows = offset + spec.max_position_embeddings;
                let mut table = zeros("the table of positions", rows.saturating_mul(hidden))?;
                if self.reads {
                    fill_sinusoids(&mut table, hidden);
                }
                Some(table)
            }
            None => None,
        };
        let token_types = match embedding.token_types {
            0 => None,
            rows => Some(self.table("token_types.weight", rows)?),
        };
        Ok(Embedding {
            tokens,
            projection,
            positions,
            token_types,
            norm: self.norm("embedding_norm", embedding.norm, hidden)?,
        })
    }

    /// Layer `index`.
    pub fn layer<P: Packer>(
        &self,
        packer: &mut P,
        index: usize,
        layer: &LayerSpec,
    ) -> Result<Layer<P::Matrix>, LoadError> {
        let at = format!("layers.{index}.");
        let norm = |role: &str, norm| self.norm(&format!("{at}{role}"), norm, self.spec.hidden_size);
        let down = self.quantization.down(index, self.spec.layers.len());
        Ok(Layer {
            attention: self.attention(packer, &format!("{at}attention."), &layer.attention)?,
            ffn: match &layer.ffn {
                FfnSpec::Dense(dense) => Ffn::Dense(self.dense(packer, &format!("{at}ffn."), dense, down)?),
                FfnSpec::Experts(experts) => Ffn::Experts(self.experts(packer, &format!("{at}ffn."), experts, down)?),
            },
            attention_norm: norm("attention_norm", layer.attention_norm)?,
            attention_post_norm: norm("attention_post_norm", layer.attention_post_norm)?,
            attention_sum_norm: norm("attention_sum_norm", layer.attention_sum_norm)?,
            ffn_norm: norm("ffn_norm", layer.ffn_norm)?,
            ffn_post_norm: norm("ffn_post_norm", layer.ffn_post_norm)?,
            ffn_sum_norm: norm("ffn_sum_norm", layer.ffn_sum_norm)?,
        })
    }

    fn attention<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        spec: &AttentionSpec,
    ) -> Result<Attention<P::Matrix>, LoadError> {
        let (hidden, usual) = (self.spec.hidden_size, self.quantization.usual());
        let projections = match &spec.projections {
            ProjectionsSpec::Heads(heads) => Projections::Heads(self.heads(packer, at, spec.heads, heads)?),
            ProjectionsSpec::Latent(latent) => Projections::Latent(self.latent(packer, at, spec.heads, latent)?),
        };
        let output = self.linear(packer, at, &[("output", hidden, usual)], spec.output_columns(), spec.output_bias)?;
        let sinks = match spec.sinks {
            true => Some(self.vector(&format!("{at}sinks.weight"), spec.heads)?),
            false => None,
        };
        Ok(Attention { projections, output, sinks })
    }

    fn heads<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        heads: usize,
        spec: &HeadProjections,
    ) -> Result<Heads<P::Matrix>, LoadError> {
        let HeadProjections { kv_heads, key_dim, value_dim, bias, qk_norm, .. } = *spec;
        let usual = self.quantization.usual();
        let parts = [
            ("q", heads * key_dim, usual),
            ("k", kv_heads * key_dim, usual),
            ("v", kv_heads * value_dim, self.quantization.values()),
        ];
        let qkv = self.linear(packer, at, &parts, self.spec.hidden_size, bias)?;
        let norms = match qk_norm {
            None => None,
            Some(HeadNormSpec { norm, over, .. }) => {
                let width = |heads| if over == NormedOver::Head { key_dim } else { heads * key_dim };
                let queries = self.present_norm(&format!("{at}q_norm"), norm, width(heads))?;
                Some([queries, self.present_norm(&format!("{at}k_norm"), norm, width(kv_heads))?])
            }
        };
        Ok(Heads { qkv, norms })
    }

    fn latent<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        heads: usize,
        spec: &LatentProjections,
    ) -> Result<Latent<P::Matrix>, LoadError> {
        let LatentProjections { query_rank, kv_rank, nope_dim, rope_dim, value_dim, norm, bias, .. } = *spec;
        let (hidden, usual) = (self.spec.hidden_size, self.quantization.usual());
        let query_columns = heads * (nope_dim + rope_dim);
        let first = query_rank.map_or(("q", query_columns, usual), |rank| ("q_a", rank, usual));
        let second = ("kv_a", kv_rank + rope_dim, usual);
        let mut input = self.linear(packer, at, &[first, second], hidden, false)?;
        if bias {
            // Queries that are projected at once have none.
            let first = match query_rank {
                Some(rank) => (Some(format!("{at}q_a.bias")), rank),
                None => (None, query_columns),
            };
            input.bias = Some(self.vectors(&[first, (Some(format!("{at}kv_a.bias")), kv_rank + rope_dim)])?);
        }
        let queries = match query_rank {
            Some(rank) => Some((
                self.present_norm(&format!("{at}q_a_norm"), norm, rank)?,
                self.linear(packer, at, &[("q_b", query_columns, usual)], rank, false)?,
            )),
            None => None,
        };
        // Rows of kv_b, for each head: its keys' and its values'. Queries go through the keys' the other way round.
        let (mut key_up, mut value_up) = (Vec::with_capacity(heads), Vec::with_capacity(heads));
        for head in 0..heads {
            let name = |what| format!("{at}kv_b.{head}.{what}");
            let [keys, values] = if let Source::Packed { file, .. } = self.source {
                [
                    MatrixPlan::packed(file, name("keys"), usual, kv_rank, nope_dim)?,
                    MatrixPlan::packed(file, name("values"), self.quantization.values(), value_dim, kv_rank)?,
                ]
            } else {
                let rows = self.head_rows(at, heads, spec, head)?;
                [
                    self.in_formats(name("keys"), vec![(rows.keys, usual)], nope_dim),
                    self.in_formats(name("values"), vec![(rows.values, self.quantization.values())], kv_rank),
                ]
            };
            key_up.push(packer.pack(keys)?);
            value_up.push(packer.pack(values)?);
        }
        let norm = self.present_norm(&format!("{at}kv_a_norm"), norm, kv_rank)?;
        let split = HeadSplit { heads, nope_dim, value_dim };
        let parts = vec![(format!("{at}kv_b"), heads * split.rows())];
        let up_site = packer.number(Site { parts, columns: kv_rank, heads: Some(split) });
        Ok(Latent { input, queries, norm, key_up, value_up, up_site })
    }

    fn head_rows(
        &self,
        at: &str,
        heads: usize,
        spec: &LatentProjections,
        head: usize,
    ) -> Result<HeadRows<'_>, LoadError> {
        let LatentProjections { kv_rank, nope_dim, value_dim, split, .. } = *spec;
        let role = format!("{at}kv_b.weight");
        let random = |what, rows| Stored::Random(RandomMatrix::new(&format!("{role}.{head}.{what}"), rows));
        let Source::Checkpoint(checkpoint) = self.source else {
            return Ok(HeadRows { keys: random("keys", kv_rank), values: random("values", value_dim) });
        };
        let plain = |role: &str, rows, columns| -> Result<View<'a>, LoadError> {
            let mut views = self.views(checkpoint, role, rows, Some(columns))?;
            match (views.pop(), views.is_empty()) {
                (Some(view), true) if view.is_plain() => Ok(view),
                _ => Err(SpecError::not_whole(role).into()),
            }
        };
        if split {
            let keys = plain(&format!("{at}k_b.weight"), heads * kv_rank, nope_dim)?;
            let values = plain(&format!("{at}v_b.weight"), heads * value_dim, kv_rank)?;
            return Ok(HeadRows {
                keys: Stored::View(keys.slice(head * kv_rank, kv_rank)),
                values: Stored::View(values.slice(head * value_dim, value_dim)),
            });
        }
        let head_dim = nope_dim + value_dim;
        let view = plain(&role, heads * head_dim, kv_rank)?;
        let first = head * head_dim;
        Ok(HeadRows {
            keys: Stored::View(view.slice(first, nope_dim).transposed(kv_rank)),
            values: Stored::View(view.slice(first + nope_dim, value_dim)),
        })
    }

    fn dense<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        spec: &DenseSpec,
        down: Format,
    ) -> Result<Dense<P::Matrix>, LoadError> {
        let (hidden, inner, usual) = (self.spec.hidden_size, spec.intermediate_size, self.quantization.usual());
        let parts = [("gate", inner, usual), ("up", inner, usual)];
        let parts = if spec.gated { &parts[..] } else { &parts[1..] };
        Ok(Dense {
            inner: self.linear(packer, at, parts, hidden, spec.bias)?,
            down: self.linear(packer, at, &[("down", hidden, down)], inner, spec.bias)?,
        })
    }

    fn experts<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        spec: &ExpertsSpec,
        down: Format,
    ) -> Result<Experts<P::Matrix>, LoadError> {
        let ExpertsSpec { experts, router, shared, .. } = spec;
        let hidden = self.spec.hidden_size;
        Ok(Experts {
            router: self.linear(packer, at, &[("router", *experts, Format::F32)], hidden, router.bias)?,
            correction: match router.correction_bias {
                true => Some(self.vector(&format!("{at}router.correction_bias"), *experts)?),
                false => None,
            },
            experts: (0..*experts)
                .map(|index| self.dense(packer, &format!("{at}experts.{index}."), &spec.expert, down))
                .collect::<Result<_, _>>()?,
            shared: match shared {
                Some(shared) => Some(self.dense(packer, &format!("{at}shared."), shared, down)?),
                None => None,
            },
            shared_gate: match spec.shared_gate {
                true => Some(self.linear(packer, at, &[("shared_gate", 1, Format::F32)], hidden, false)?),
                false => None,
            },
        })
    }

    /// The matrix of parts, each in the format beside it unless it stays as it is stored.
    fn in_formats<'s>(&self, name: String, parts: Vec<(Stored<'s>, Format)>, columns: usize) -> MatrixPlan<'s> {
        let with_format = parts.into_iter().map(|(part, usual)| {
            let format = self.quantization.of(usual, &part, columns);
            (part, format)
        });
        MatrixPlan::new(name, with_format.collect(), columns)
    }

    /// The matrix of `<at><role>.weight` of all parts, one below the other, and of their biases.
    fn linear<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        parts: &[RolePart<'_>],
        columns: usize,
        bias: bool,
    ) -> Result<Linear<P::Matrix>, LoadError> {
        let mut plan = self.plan(at, parts, columns)?;
        let biases =
            || parts.iter().map(|(role, rows, _)| (Some(format!("{at}{role}.bias")), *rows)).collect::<Vec<_>>();
        let bias = if bias { Some(self.vectors(&biases())?) } else { None };
        let parts = parts.iter().map(|(role, rows, _)| (format!("{at}{role}"), *rows)).collect();
        let site = packer.number(Site { parts, columns, heads: None });
        plan.site = Some(site);
        Ok(Linear { weight: packer.pack(plan)?, bias, site })
    }

    /// The matrix of `<at><role>.weight` of all parts.
    fn plan(&self, at: &str, parts: &[RolePart<'_>], columns: usize) -> Result<MatrixPlan<'_>, LoadError> {
        let roles: Vec<_> = parts.iter().map(|(role, ..)| *role).collect();
        let name = format!("{at}{}", roles.join("+"));
        if let Source::Packed { file, .. } = self.source {
            // Parts are all numbers, and then alike, or all codes.
            return MatrixPlan::packed(file, name, parts[0].2, parts.iter().map(|(_, rows, _)| rows).sum(), columns);
        }
        let mut stored = Vec::with_capacity(parts.len());
        for (role, rows, format) in parts {
            let weight = self.stored(&format!("{at}{role}.weight"), *rows, Some(columns))?;
            stored.extend(weight.into_iter().map(|part| (part, *format)));
        }
        Ok(self.in_formats(name, stored, columns))
    }

    /// What a checkpoint has of a role, or random numbers.
    fn stored(&self, role: &str, rows: usize, columns: Option<usize>) -> Result<Vec<Stored<'_>>, LoadError> {
        let Source::Checkpoint(checkpoint) = self.source else {
            return Ok(vec![Stored::Random(RandomMatrix::new(role, rows))]);
        };
        let views = self.views(checkpoint, role, rows, columns)?;
        Ok(views.into_iter().map(Stored::View).collect())
    }

    /// The tensors of a role, whose numbers are checked too if they are to be read.
    fn views(
        &self,
        checkpoint: &'a Checkpoint,
        role: &str,
        rows: usize,
        columns: Option<usize>,
    ) -> Result<Vec<View<'a>>, LoadError> {
        let views = View::of_role(checkpoint, self.spec, role, rows, columns)?;
        if self.reads {
            views.iter().try_for_each(View::check)?;
        }
        Ok(views)
    }

    fn norm(&self, role: &str, spec: Option<NormSpec>, width: usize) -> Result<Option<Norm>, LoadError> {
        spec.map(|spec| self.present_norm(role, spec, width)).transpose()
    }

    fn present_norm(&self, role: &str, spec: NormSpec, width: usize) -> Result<Norm, LoadError> {
        let vector = |name: &str, there: bool| match there {
            true => self.vector(&format!("{role}.{name}"), width).map(Some),
            false => Ok(None),
        };
        let [weight, bias] = spec.parameters();
        Ok(Norm { spec, weight: vector("weight", weight)?, bias: vector("bias", bias)? })
    }

    fn vector(&self, role: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        self.vectors(&[(Some(role.to_owned()), length)])
    }

    /// The vectors of roles, and so many zeros where there is none, one after the other.
    fn vectors(&self, parts: &[(Option<String>, usize)]) -> Result<Vec<f32>, LoadError> {
        let mut stored = Vec::with_capacity(parts.len());
        for (role, length) in parts {
            stored.push(match (role, self.source) {
                (Some(role), Source::Checkpoint(_)) => self.stored(role, *length, None)?,
                _ => Vec::new(),
            });
        }
        let mut all = zeros("a vector", parts.iter().map(|(_, length)| length).sum())?;
        let mut left = all.as_mut_slice();
        for ((role, length), stored) in parts.iter().zip(stored) {
            let (vector, others) = left.split_at_mut(*length);
            left = others;
            let Some(role) = role else { continue };
            match self.source {
                Source::Packed { file, .. } => packed::vector(file, role, self.reads, vector)?,
                Source::Random if self.reads && role.ends_with("norm.weight") => vector.fill(1.0),
                Source::Checkpoint(_) if self.reads => {
                    let rows = stored.iter().flat_map(|part| (0..part.rows()).map(move |row| (part, row)));
                    for (element, (part, row)) in vector.iter_mut().zip(rows) {
                        part.read_row(row, std::slice::from_mut(element));
                    }
                }
                Source::Random | Source::Checkpoint(_) => {}
            }
            self.note(role, vector);
        }
        Ok(all)
    }

    /// A table of so many rows of `hidden_size` columns.
    fn table(&self, role: &'static str, rows: usize) -> Result<Vec<f32>, LoadError> {
        let hidden = self.spec.hidden_size;
        let mut table = zeros(role, rows.saturating_mul(hidden))?;
        if let Source::Packed { file, .. } = self.source {
            packed::vector(file, role, self.reads, &mut table)?;
            return Ok(table);
        }
        let parts = self.stored(role, rows, Some(hidden))?;
        let mut out = table.chunks_exact_mut(hidden);
        for part in parts.iter().filter(|_| self.reads) {
            (0..part.rows()).zip(&mut out).for_each(|(row, out)| part.read_row(row, out));
        }
        self.note(role, &table);
        Ok(table)
    }

    fn note(&self, role: &str, vector: &[f32]) {
        if let Some(vectors) = self.vectors {
            vectors.borrow_mut().push((role.to_owned(), vector.to_owned()));
        }
    }
}

/// Zeros that take no memory before something else is written there.
fn zeros(what: &'static str, length: usize) -> Result<Vec<f32>, LoadError> {
    bytemuck::allocation::try_zeroed_vec(length).map_err(|()| LoadError::Memory {
        what,
        needs: (length as u64).saturating_mul(size_of::<f32>() as u64),
        available: machine::available_memory(),
    })
}

/// Sines and then cosines of the first positions, a row of `width` each; angles are products of two f32, as the
/// reference's are.
fn fill_sinusoids(table: &mut [f32], width: usize) {
    let half = width / 2;
    let step = 10_000f64.ln() / (half.max(2) - 1) as f64;
    let frequencies: Vec<f32> = (0..half).map(|i| (-(i as f64) * step).exp() as f32).collect();
    for (position, row) in table.chunks_exact_mut(width).enumerate() {
        for (i, frequency) in frequencies.iter().enumerate() {
            let angle = f64::from(position as f32 * frequency);
            (row[i], row[half + i]) = (angle.sin() as f32, angle.cos() as f32);
        }
    }
}
