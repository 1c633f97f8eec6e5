//! A model's weights as the kernels read them, and how they come out of a checkpoint.

use ferrule_formats::{Checkpoint, CheckpointError, FloatDtype, FloatTensor};
use ferrule_kernels::{AllocError, Exec, Format, PackError, PackedMatrix, PoolError, RowSource, machine};

use crate::limits::SpecError;
use crate::random::RandomMatrix;
use crate::spec::{FfnSpec, LayerSpec, ModelSpec, NormSpec};

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The description cannot be.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The files cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A tensor's shape is not what the config says.
    #[error("tensor {tensor:?} has the shape {found:?}; the config asks for {expected:?} ({meaning})")]
    Shape {
        /// Its name in the checkpoint.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// What the config asks for.
        expected: Vec<usize>,
        /// What the axes are.
        meaning: &'static str,
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
    /// The load was cancelled.
    #[error("the load was cancelled")]
    Cancelled,
    /// A defect of ferrule.
    #[error("a worker panicked while packing weights: {0}")]
    Panicked(String),
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

/// y = W x + b
pub(crate) struct Linear {
    pub weight: PackedMatrix,
    pub bias: Option<Vec<f32>>,
}

/// A norm's spec with its weights.
pub(crate) struct Norm {
    pub spec: NormSpec,
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
}

/// One layer's weights; the projections that share an input are one matrix.
pub(crate) struct Layer {
    pub attention_norm: Norm,
    /// Rows: all query heads, all key heads, all value heads.
    pub qkv: Linear,
    /// Weights for each query head and for each key head.
    pub qk_norm: Option<[Vec<f32>; 2]>,
    pub output: Linear,
    pub ffn_norm: Norm,
    /// Rows: gate, up.
    pub gate_up: Linear,
    pub down: Linear,
}

/// All weights.
pub(crate) struct Weights {
    /// A row for each token; also the head's matrix where that is tied.
    pub embedding: PackedMatrix,
    pub layers: Vec<Layer>,
    pub final_norm: Norm,
    /// None where the head is the embedding.
    pub head: Option<Linear>,
}

impl Weights {
    /// Every packed matrix.
    pub fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let layers = self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        layers.chain(&self.head).map(|linear| &linear.weight).chain([&self.embedding])
    }
}

/// Where weights come from.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// A checkpoint's files.
    Checkpoint(&'a Checkpoint),
    /// Random numbers, made as they are packed.
    Random,
}

/// What a role's weights are read from.
enum Stored<'a> {
    Tensor(FloatTensor<'a>),
    Random(RandomMatrix),
}

impl Stored<'_> {
    fn rows(&self) -> usize {
        match self {
            Self::Tensor(tensor) => tensor.shape()[0],
            Self::Random(matrix) => matrix.rows,
        }
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Tensor(tensor) => tensor.read_f32(row * out.len(), out),
            Self::Random(matrix) => matrix.read_row(row, out),
        }
    }

    /// The format that holds it exactly; of random numbers the one that most checkpoints have.
    fn format(&self) -> Format {
        match self {
            Self::Tensor(tensor) => match tensor.float_dtype() {
                FloatDtype::F32 => Format::F32,
                FloatDtype::F16 => Format::F16,
                FloatDtype::Bf16 => Format::Bf16,
            },
            Self::Random(_) => Format::Bf16,
        }
    }
}

/// A matrix that is to be packed: stored matrices, their rows one after the other.
struct MatrixPlan<'a> {
    parts: Vec<Stored<'a>>,
    rows: usize,
    columns: usize,
    format: Format,
    bias: Option<Vec<f32>>,
}

impl MatrixPlan<'_> {
    fn bytes(&self) -> u64 {
        PackedMatrix::bytes_for(self.format, self.rows, self.columns).unwrap_or(u64::MAX)
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
}

/// Told how many bytes of the packed weights are done, of how many.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Reads the roles of a spec out of a source.
pub(crate) struct Loader<'a> {
    pub spec: &'a ModelSpec,
    pub source: Source<'a>,
    /// The format to pack in; none means each matrix as it is stored.
    pub format: Option<Format>,
    pub exec: Exec<'a>,
}

struct LayerPlan<'a> {
    qkv: MatrixPlan<'a>,
    output: MatrixPlan<'a>,
    gate_up: MatrixPlan<'a>,
    down: MatrixPlan<'a>,
}

impl<'a> Loader<'a> {
    /// Packs all weights, tensor by tensor; the source's pages are given back after each.
    ///
    /// # Errors
    /// [`LoadError`], before anything large is allocated where a file or the memory is at fault.
    pub fn load(&self, progress: Progress<'_>) -> Result<Weights, LoadError> {
        let embedding = self.matrix(&[("embedding", self.spec.vocab_size)], self.spec.hidden_size, false)?;
        let head = match self.spec.head.tied {
            true => None,
            false => {
                Some(self.matrix(&[("head", self.spec.vocab_size)], self.spec.hidden_size, self.spec.head.bias)?)
            }
        };
        let layers = self.spec.layers.iter().enumerate();
        let layers = layers.map(|(i, layer)| self.layer_plan(i, layer)).collect::<Result<Vec<_>, _>>()?;

        let each = |layer: &LayerPlan<'_>| {
            [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]
                .map(MatrixPlan::bytes)
                .into_iter()
                .fold(0, u64::saturating_add)
        };
        let total = [&embedding]
            .into_iter()
            .chain(&head)
            .map(MatrixPlan::bytes)
            .chain(layers.iter().map(each))
            .fold(0, u64::saturating_add);
        let available = machine::available_memory();
        if total > available {
            return Err(LoadError::Memory { what: "the model's packed weights", needs: total, available });
        }

        let mut done = 0;
        let mut pack = |plan: MatrixPlan<'a>| -> Result<Linear, LoadError> {
            let weight = PackedMatrix::pack(&self.exec, &[(plan.format, plan.rows)], plan.columns, &plan)?;
            plan.parts.iter().for_each(|part| self.release(part));
            done += weight.bytes() as u64;
            progress(done, total);
            Ok(Linear { weight, bias: plan.bias })
        };
        let embedding = pack(embedding)?.weight;
        let mut packed_layers = Vec::with_capacity(layers.len());
        for (i, (plan, layer)) in layers.into_iter().zip(&self.spec.layers).enumerate() {
            let norm = |role: &str, spec| self.norm(&format!("layers.{i}.{role}"), spec, self.spec.hidden_size);
            let head_norm =
                |role: &str| self.vector(&format!("layers.{i}.attention.{role}.weight"), layer.attention.key_dim);
            let qk_norm = match layer.attention.qk_norm {
                None => None,
                Some(_) => Some([head_norm("q_norm")?, head_norm("k_norm")?]),
            };
            packed_layers.push(Layer {
                attention_norm: norm("attention_norm", layer.attention_norm)?,
                qkv: pack(plan.qkv)?,
                qk_norm,
                output: pack(plan.output)?,
                ffn_norm: norm("ffn_norm", layer.ffn_norm)?,
                gate_up: pack(plan.gate_up)?,
                down: pack(plan.down)?,
            });
        }
        Ok(Weights {
            embedding,
            layers: packed_layers,
            final_norm: self.norm("final_norm", self.spec.final_norm, self.spec.hidden_size)?,
            head: head.map(pack).transpose()?,
        })
    }

    fn layer_plan(&self, index: usize, layer: &LayerSpec) -> Result<LayerPlan<'a>, LoadError> {
        let hidden = self.spec.hidden_size;
        let attention = &layer.attention;
        let FfnSpec::Gated { intermediate_size, bias, .. } = layer.ffn;
        let matrix = |parts: &[(&str, usize)], columns, bias| {
            let roles: Vec<_> = parts.iter().map(|(role, rows)| (format!("layers.{index}.{role}"), *rows)).collect();
            let roles: Vec<_> = roles.iter().map(|(role, rows)| (role.as_str(), *rows)).collect();
            self.matrix(&roles, columns, bias)
        };
        let (keys, values) = (attention.kv_heads * attention.key_dim, attention.kv_heads * attention.value_dim);
        Ok(LayerPlan {
            qkv: matrix(
                &[("attention.q", attention.heads * attention.key_dim), ("attention.k", keys), ("attention.v", values)],
                hidden,
                attention.qkv_bias,
            )?,
            output: matrix(
                &[("attention.output", hidden)],
                attention.heads * attention.value_dim,
                attention.output_bias,
            )?,
            gate_up: matrix(&[("ffn.gate", intermediate_size), ("ffn.up", intermediate_size)], hidden, bias)?,
            down: matrix(&[("ffn.down", hidden)], intermediate_size, bias)?,
        })
    }

    fn stored(&self, role: &str, rows: usize, columns: usize) -> Result<Stored<'a>, LoadError> {
        Ok(match self.source {
            Source::Checkpoint(checkpoint) => {
                Stored::Tensor(self.tensor(checkpoint, role, &[rows, columns], "outputs, inputs")?)
            }
            Source::Random => Stored::Random(RandomMatrix::new(role, rows)),
        })
    }

    /// Gives back the memory behind what was packed.
    fn release(&self, part: &Stored<'a>) {
        if let (Source::Checkpoint(checkpoint), Stored::Tensor(tensor)) = (self.source, part) {
            checkpoint.release(tensor);
        }
    }

    /// Finds and checks what is stored for `<role>.weight` (and `<role>.bias`) of a matrix, one below the other.
    fn matrix(&self, roles: &[(&str, usize)], columns: usize, bias: bool) -> Result<MatrixPlan<'a>, LoadError> {
        let mut parts = Vec::with_capacity(roles.len());
        let mut biases = Vec::new();
        let mut format = self.format;
        for (role, rows) in roles {
            let stored = self.stored(&format!("{role}.weight"), *rows, columns)?;
            if self.format.is_none() {
                // As stored; parts that are stored differently share the format that holds both exactly.
                let exact = stored.format();
                format = Some(format.map_or(exact, |other| if other == exact { exact } else { Format::F32 }));
            }
            if bias {
                biases.extend(self.vector(&format!("{role}.bias"), *rows)?);
            }
            parts.push(stored);
        }
        Ok(MatrixPlan {
            rows: roles.iter().map(|(_, rows)| rows).sum(),
            parts,
            columns,
            format: format.unwrap_or(Format::F32),
            bias: bias.then_some(biases),
        })
    }

    fn norm(&self, role: &str, spec: NormSpec, width: usize) -> Result<Norm, LoadError> {
        let weight = self.vector(&format!("{role}.weight"), width)?;
        let bias = match spec {
            NormSpec::Rms { .. } => None,
            NormSpec::Layer { .. } => Some(self.vector(&format!("{role}.bias"), width)?),
        };
        Ok(Norm { spec, weight, bias })
    }

    fn vector(&self, role: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        let mut vector = vec![0.0; length];
        match self.source {
            Source::Checkpoint(checkpoint) => {
                self.tensor(checkpoint, role, &[length], "elements")?.read_f32(0, &mut vector);
            }
            Source::Random if role.ends_with(".bias") => {}
            Source::Random => vector.fill(1.0),
        }
        Ok(vector)
    }

    fn tensor(
        &self,
        checkpoint: &'a Checkpoint,
        role: &str,
        expected: &[usize],
        meaning: &'static str,
    ) -> Result<FloatTensor<'a>, LoadError> {
        let name = self.spec.tensor(role)?;
        let tensor = checkpoint.float_tensor(name)?;
        if tensor.shape() != expected {
            return Err(LoadError::Shape {
                tensor: name.to_owned(),
                found: tensor.shape().to_vec(),
                expected: expected.to_vec(),
                meaning,
            });
        }
        Ok(tensor)
    }
}
