//! Reading one role: a linear layer, a norm, a vector or a table.

use ferrule_kernels::{Format, machine};

use super::Loader;
use crate::pruning::StaysDense;
use crate::spec::NormSpec;
use crate::weights::error::LoadError;
use crate::weights::plan::{MatrixPlan, Packer};
use crate::weights::sites::Site;
use crate::weights::source::{MatrixPart, MatrixRequest};
use crate::weights::{Linear, Norm};

/// The rows of one role in a linear layer: role, number of outputs, and format.
pub(crate) type RolePart<'r> = (&'r str, usize, Format);

impl<'a> Loader<'a> {
    /// Returns the width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        self.spec.hidden_size
    }

    /// Returns the format of most matrices.
    pub fn usual(&self) -> Format {
        self.quantization.usual()
    }

    /// Returns the format of projections to values.
    pub fn values(&self) -> Format {
        self.quantization.values()
    }

    /// Returns the format of the projection from the inner width of a feed-forward network in layer `layer`.
    pub fn down(&self, layer: usize) -> Format {
        self.quantization.down(layer, self.spec.layers.len())
    }

    /// Loads the linear layer whose outputs are those of all `parts`, stacked: the matrices `<at><role>.weight` and, if
    /// `bias`, the vectors `<at><role>.bias`.
    pub fn linear<P: Packer>(
        &self,
        packer: &mut P,
        at: &str,
        parts: &[RolePart<'_>],
        columns: usize,
        bias: bool,
    ) -> Result<Linear<P::Matrix>, LoadError> {
        let roles: Vec<_> = parts.iter().map(|(role, ..)| *role).collect();
        let weights: Vec<_> = roles.iter().map(|role| format!("{at}{role}.weight")).collect();
        let sparse = self.pruning.map(|pruning| pruning.formats(at, parts, columns));
        let stays_dense = sparse.as_ref().and_then(|sparse| sparse.as_ref().err().copied());
        let sparse = sparse.and_then(Result::ok);
        let formats = sparse.clone().unwrap_or_else(|| parts.iter().map(|(_, _, format)| *format).collect());
        let rows = weights.iter().zip(parts).zip(formats);
        let rows: Vec<_> =
            rows.map(|((role, &(_, rows, _)), format)| MatrixPart { role, rows, format, slice: None }).collect();
        let mut plan = self.matrix(format!("{at}{}", roles.join("+")), &rows, columns)?;
        plan.pruning = self.pruning.filter(|_| sparse.is_some());
        plan.stays_dense = stays_dense.filter(|why| *why != StaysDense::Exempt);
        let biases =
            || parts.iter().map(|(role, rows, _)| (Some(format!("{at}{role}.bias")), *rows)).collect::<Vec<_>>();
        let bias = if bias { Some(self.vectors(&biases())?) } else { None };
        let parts = parts.iter().map(|(role, rows, _)| (format!("{at}{role}"), *rows)).collect();
        let site = packer.add_site(Site { parts, columns, heads: None });
        plan.site = Some(site);
        let outputs = rows.iter().map(|part| part.rows).sum();
        plan.panels = self.part.group.as_ref().and_then(|group| group.panels(outputs));
        let group = self.part.group.clone().filter(|_| plan.panels.is_some());
        Ok(Linear { weight: packer.pack(plan)?, bias, site, outputs, group })
    }

    /// Finds the matrix `name` in the source.
    pub fn matrix(&self, name: String, parts: &[MatrixPart<'_>], columns: usize) -> Result<MatrixPlan<'a>, LoadError> {
        let (quantization, check_values) = (self.quantization, self.reads);
        let parts = &self.with_recipe(parts)?;
        let mut plan = self.source.matrix(MatrixRequest { name, parts, columns, quantization, check_values })?;
        plan.is_again = self.again;
        plan.roles = parts.iter().map(|part| (part.role.to_owned(), part.rows)).collect();
        if let Some(recipe) = self.recipe {
            let of_rows = parts.iter().map(|part| match part.format.is_integer() {
                true => Ok(recipe.row_formats(self.spec.tensor(part.role)?, part.format, part.rows)?),
                false => Ok(vec![(part.format, part.rows)]),
            });
            let of_rows = of_rows.collect::<Result<Vec<_>, LoadError>>()?.concat();
            if !of_rows.iter().copied().eq(parts.iter().map(|part| (part.format, part.rows))) {
                plan = plan.with_formats(&of_rows);
            }
            let formats = parts.iter().map(|part| Ok((self.spec.tensor(part.role)?, part.format)));
            recipe.check_matrix(&formats.collect::<Result<Vec<_>, LoadError>>()?, &plan.bands)?;
        }
        Ok(plan)
    }

    /// Returns parts of a matrix with the formats of the recipe. It has none for floating-point matrices.
    fn with_recipe<'r>(&self, parts: &[MatrixPart<'r>]) -> Result<Vec<MatrixPart<'r>>, LoadError> {
        let with_recipe = |part: &MatrixPart<'r>| match self.recipe.filter(|_| part.format.is_integer()) {
            Some(recipe) => {
                let format = recipe.format(self.spec.tensor(part.role)?).unwrap_or(part.format);
                Ok(MatrixPart { format, ..*part })
            }
            None => Ok(*part),
        };
        parts.iter().map(with_recipe).collect()
    }

    pub fn optional_norm(&self, role: &str, spec: Option<NormSpec>, width: usize) -> Result<Option<Norm>, LoadError> {
        spec.map(|spec| self.norm(role, spec, width)).transpose()
    }

    /// Loads a norm over `width` elements: `<role>.weight` and `<role>.bias`, where the spec has them.
    pub fn norm(&self, role: &str, spec: NormSpec, width: usize) -> Result<Norm, LoadError> {
        let vector = |name: &str, is_present: bool| match is_present {
            true => self.vector(&format!("{role}.{name}"), width).map(Some),
            false => Ok(None),
        };
        let [weight, bias] = spec.parameters();
        Ok(Norm { spec, weight: vector("weight", weight)?, bias: vector("bias", bias)? })
    }

    pub fn vector(&self, role: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        self.vectors(&[(Some(role.to_owned()), length)])
    }

    /// Loads the vectors of several roles, concatenated. A part without a role is zeros.
    pub fn vectors(&self, parts: &[(Option<String>, usize)]) -> Result<Vec<f32>, LoadError> {
        let readers = parts.iter().map(|(role, length)| {
            role.as_ref().map(|role| Ok((role, self.source.vector(role, *length, None)?))).transpose()
        });
        // All roles are found before anything is allocated.
        let readers = readers.collect::<Result<Vec<_>, LoadError>>()?;
        let mut all = zeros("a vector", parts.iter().map(|(_, length)| length).sum())?;
        let mut rest = all.as_mut_slice();
        for ((_, length), reader) in parts.iter().zip(readers) {
            let (vector, others) = rest.split_at_mut(*length);
            rest = others;
            let Some((role, read)) = reader else { continue };
            if self.reads {
                read(vector)?;
            }
            self.record(role, vector);
        }
        Ok(all)
    }

    /// Loads a table `[rows, columns]`; `what` names it in an error.
    pub fn table(&self, what: &'static str, role: &str, [rows, columns]: [usize; 2]) -> Result<Vec<f32>, LoadError> {
        let read = self.source.vector(role, rows, Some(columns))?;
        let mut table = zeros(what, rows.saturating_mul(columns))?;
        if self.reads {
            read(&mut table)?;
        }
        self.record(role, &table);
        Ok(table)
    }

    /// Loads a table of ids below `below`, with `columns` of them for each token of the vocabulary.
    pub fn ids(&self, role: &str, columns: usize, below: usize) -> Result<Vec<f32>, LoadError> {
        let rows = self.spec.vocab_size;
        let read = self.source.ids(role, [rows, columns], below)?;
        let mut table = zeros("a table of ids", rows.saturating_mul(columns))?;
        if self.reads {
            read(&mut table)?;
        }
        self.record(role, &table);
        Ok(table)
    }

    /// Checks that a checkpoint that stores the constants of a role has the same as follow from the config.
    pub fn check_constants(&self, role: &str, expected: &[i64]) -> Result<(), LoadError> {
        if self.reads { self.source.check_constants(role, expected) } else { Ok(()) }
    }

    fn record(&self, role: &str, vector: &[f32]) {
        if let Some(vectors) = &self.vectors {
            vectors.borrow_mut().push((role.to_owned(), vector.to_owned()));
        }
    }
}

/// Allocates zeros, whose pages take no memory until they are written.
pub(super) fn zeros(what: &'static str, length: usize) -> Result<Vec<f32>, LoadError> {
    bytemuck::allocation::try_zeroed_vec(length).map_err(|()| LoadError::Memory {
        what,
        needs: (length as u64).saturating_mul(size_of::<f32>() as u64),
        available: machine::available_memory(),
    })
}
