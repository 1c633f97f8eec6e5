//! The roles of a feed-forward network: dense, or a mixture of experts.

use ferrule_kernels::Format;

use super::Loader;
use crate::spec::{DenseSpec, ExpertsSpec};
use crate::weights::error::LoadError;
use crate::weights::plan::Packer;
use crate::weights::{Dense, Experts};

impl Loader<'_> {
    pub(super) fn dense<P: Packer>(
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

    pub(super) fn experts<P: Packer>(
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
}
