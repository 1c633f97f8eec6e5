//! Instruction sets. A capability is a value: a token that only detection can make.
//!
//! A kernel is written once against the vocabulary [`Simd`] and run with [`Isa::run`], which enters a function compiled
//! for the chosen instruction set. Adding an instruction set is one file here (its token, its feature list, its
//! vocabulary) and one line in `isa_registry`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512vnni;
#[cfg(target_arch = "x86_64")]
mod avxvnni;
mod scalar;
mod simd;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "x86_64")]
pub use avx512vnni::Avx512Vnni;
#[cfg(target_arch = "x86_64")]
pub use avxvnni::AvxVnni;
#[cfg(all(target_arch = "x86_64", test))]
pub use avxvnni::AvxVnniEvex;
pub use scalar::Scalar;
pub use simd::{ByteLine, Kernel, LANES, LINE, Simd};

/// Writes [`Isa`] and its dispatch from one list, slowest first.
macro_rules! isa_registry {
    ($($(#[$cfg:meta])* $name:literal => $token:ident),* $(,)?) => {
        /// An instruction set that this machine was seen to have.
        #[derive(Clone, Copy, Debug)]
        pub enum Isa {
            $($(#[$cfg])* #[doc = concat!("`", $name, "`")] $token($token)),*
        }

        impl Isa {
            /// Every name that this build knows, slowest first.
            pub const NAMES: &'static [&'static str] = &[$($(#[$cfg])* $name),*];

            /// The instruction sets that this machine has, slowest first.
            #[must_use]
            pub fn available() -> Vec<Self> {
                let mut found = Vec::new();
                $($(#[$cfg])* found.extend($token::detect().map(Isa::$token));)*
                found
            }

            /// The name that `FERRULE_ISA` takes.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $($(#[$cfg])* Isa::$token(_) => $name),* }
            }

            /// Runs `kernel` in a function compiled for this instruction set.
            #[inline]
            pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
                match self { $($(#[$cfg])* Isa::$token(token) => token.vectorize(kernel)),* }
            }
        }
    };
}

isa_registry! {
    "scalar" => Scalar,
    #[cfg(target_arch = "x86_64")]
    "avx2" => Avx2,
    // For tests on machines without AVX-VNNI: those that have this have something faster.
    #[cfg(all(target_arch = "x86_64", test))]
    "avxvnni-evex" => AvxVnniEvex,
    #[cfg(target_arch = "x86_64")]
    "avxvnni" => AvxVnni,
    #[cfg(target_arch = "x86_64")]
    "avx512" => Avx512,
    #[cfg(target_arch = "x86_64")]
    "avx512vnni" => Avx512Vnni,
}

/// Why `FERRULE_ISA` cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// No instruction set has this name.
    #[error("FERRULE_ISA={name:?} is not an instruction set that ferrule knows; it knows {}", Isa::NAMES.join(", "))]
    Unknown {
        /// What the variable held.
        name: String,
    },
    /// The name is known, but this machine lacks the instructions.
    #[error("FERRULE_ISA={name:?} needs instructions that this machine lacks; it has {available}")]
    Missing {
        /// What the variable held.
        name: String,
        /// What could be chosen instead.
        available: String,
    },
}

impl Isa {
    /// The fastest instruction set of this machine.
    #[must_use]
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Isa::Scalar(Scalar))
    }

    /// The instruction set called `name`.
    ///
    /// # Errors
    /// [`IsaError`] if no instruction set has that name or this machine lacks it.
    pub fn named(name: &str) -> Result<Self, IsaError> {
        let available = Self::available();
        if let Some(isa) = available.iter().find(|isa| isa.name() == name) {
            return Ok(*isa);
        }
        if !Self::NAMES.contains(&name) {
            return Err(IsaError::Unknown { name: name.to_owned() });
        }
        let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
        Err(IsaError::Missing { name: name.to_owned(), available: names.join(", ") })
    }

    /// What `FERRULE_ISA` asks for, or the fastest where it is unset or empty.
    ///
    /// # Errors
    /// [`IsaError`], as [`Isa::named`].
    pub fn from_environment() -> Result<Self, IsaError> {
        match std::env::var_os("FERRULE_ISA") {
            Some(name) if !name.is_empty() => Self::named(&name.to_string_lossy()),
            _ => Ok(Self::best()),
        }
    }
}
