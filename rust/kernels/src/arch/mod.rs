//! Instruction sets. Each is a token that only detection can create; the token proves that the machine has the
//! instructions.
//!
//! A kernel is written once against the operations of [`Simd`] and run with [`Isa::run`], which enters a function that is
//! compiled for the chosen instruction set. A kernel that also needs the int8 dot products of [`Dot`] is run with
//! [`Isa::run_dot`]. Instruction sets that differ only in their dot products share the code of all other kernels. A
//! [`MatrixUnit`] multiplies whole tiles; an instruction set that has one is another one and its unit, and shares all code
//! but that of [`Isa::run_matrix`].
//!
//! Each instruction set is one file or folder here (its token, its features, its operations), one line in `isa_registry`
//! and one cargo feature. A build without a feature is faster to compile and cannot use that instruction set; scalar code is
//! part of every build.

#[cfg(any(debug_assertions, all(target_arch = "x86_64", feature = "amx")))]
mod amx;
#[cfg(all(target_arch = "x86_64", feature = "avx2"))]
mod avx2;
#[cfg(all(target_arch = "x86_64", feature = "avx512"))]
mod avx512;
#[cfg(all(target_arch = "x86_64", feature = "avx512vnni"))]
mod avx512vnni;
#[cfg(all(target_arch = "x86_64", feature = "avxvnni"))]
mod avxvnni;
#[cfg(all(target_arch = "x86_64", any(feature = "avx2", feature = "avx512")))]
mod expand;
mod matrix;
mod scalar;
mod simd;
#[cfg(test)]
mod tests;

#[cfg(all(target_arch = "x86_64", feature = "amx"))]
pub use amx::Amx;
#[cfg(debug_assertions)]
pub use amx::Model;
#[cfg(all(target_arch = "x86_64", feature = "avx2"))]
pub use avx2::Avx2;
#[cfg(all(target_arch = "x86_64", feature = "avx512"))]
pub use avx512::Avx512;
#[cfg(all(target_arch = "x86_64", feature = "avx512vnni"))]
pub use avx512vnni::Avx512Vnni;
#[cfg(all(target_arch = "x86_64", feature = "avxvnni"))]
pub use avxvnni::AvxVnni;
#[cfg(all(target_arch = "x86_64", feature = "avxvnni", test))]
use avxvnni::AvxVnniEvex;
pub use matrix::{MatrixKernel, MatrixUnit, RowTile, TileSums, Tiles, WithUnit};
pub use scalar::Scalar;
pub use simd::{ByteLine, Dot, DotKernel, Kernel, LANES, LINE, Plane, Simd};

/// Defines [`Isa`] and its dispatch from one list, slowest first. Each name is that of a cargo feature too, except
/// `scalar`.
macro_rules! isa_registry {
    (scalar => Scalar, $($name:literal => $token:ident),* $(,)?) => {
        /// Instruction set that this machine has.
        ///
        /// ```
        /// use ferrule_kernels::arch::{Isa, Kernel, LANES, Simd};
        ///
        /// struct Double<'a>(&'a mut [f32; LANES]);
        ///
        /// impl Kernel for Double<'_> {
        ///     type Output = ();
        ///
        ///     #[inline(always)]
        ///     fn run<S: Simd>(self, simd: S) {
        ///         let x = simd.load(self.0);
        ///         simd.store(simd.add(x, x), self.0);
        ///     }
        /// }
        ///
        /// let mut x = [1.5; LANES];
        /// Isa::best().run(Double(&mut x));
        /// assert_eq!(x, [3.0; LANES]);
        /// ```
        #[derive(Clone, Copy, Debug)]
        pub enum Isa {
            /// `scalar`
            Scalar(Scalar),
            $(
                #[doc = concat!("`", $name, "`")]
                #[cfg(all(target_arch = "x86_64", feature = $name))]
                $token($token),
            )*
            /// AVX-512 with VNNI and the software model of a matrix unit, which developer builds have for tests.
            #[cfg(all(debug_assertions, target_arch = "x86_64", feature = "avx512vnni"))]
            Model(WithUnit<Avx512Vnni, Model>),
        }

        impl Isa {
            /// Names of all instruction sets for this architecture, slowest first, whether or not this build includes them.
            pub const NAMES: &'static [&'static str] = &["scalar", $(#[cfg(target_arch = "x86_64")] $name),*];

            /// Returns the instruction sets that this machine has and this build includes, slowest first.
            #[must_use]
            pub fn available() -> Vec<Self> {
                Self::NAMES.iter().filter_map(|name| Self::detect(name)).collect()
            }

            /// Returns the instruction set called `name`, if this machine has it and this build includes it.
            fn detect(name: &str) -> Option<Self> {
                match name {
                    "scalar" => Some(Isa::Scalar(Scalar)),
                    $(
                        #[cfg(all(target_arch = "x86_64", feature = $name))]
                        $name => $token::detect().map(Isa::$token),
                    )*
                    _ => None,
                }
            }

            /// Returns the name that `FERRULE_ISA` takes.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    Isa::Scalar(_) => "scalar",
                    $(
                        #[cfg(all(target_arch = "x86_64", feature = $name))]
                        Isa::$token(_) => $name,
                    )*
                    #[cfg(all(debug_assertions, target_arch = "x86_64", feature = "avx512vnni"))]
                    Isa::Model(_) => "model",
                }
            }

            /// Runs `kernel` in a function that is compiled for this instruction set.
            #[inline]
            pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
                match self {
                    Isa::Scalar(token) => token.vectorize(kernel),
                    $(
                        #[cfg(all(target_arch = "x86_64", feature = $name))]
                        Isa::$token(token) => token.vectorize(kernel),
                    )*
                    #[cfg(all(debug_assertions, target_arch = "x86_64", feature = "avx512vnni"))]
                    Isa::Model(token) => token.vectorize(kernel),
                }
            }

            /// Runs `kernel` in a function that is compiled for this instruction set and its dot products.
            #[inline]
            pub fn run_dot<K: DotKernel>(self, kernel: K) -> K::Output {
                match self {
                    Isa::Scalar(token) => token.vectorize_dot(kernel),
                    $(
                        #[cfg(all(target_arch = "x86_64", feature = $name))]
                        Isa::$token(token) => token.vectorize_dot(kernel),
                    )*
                    #[cfg(all(debug_assertions, target_arch = "x86_64", feature = "avx512vnni"))]
                    Isa::Model(token) => token.vectorize_dot(kernel),
                }
            }
        }
    };
}

isa_registry! {
    scalar => Scalar,
    "avx2" => Avx2,
    "avxvnni" => AvxVnni,
    "avx512" => Avx512,
    "avx512vnni" => Avx512Vnni,
    "amx" => Amx,
}

/// Error of an instruction set name in `FERRULE_ISA`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// No instruction set has this name.
    #[error("FERRULE_ISA={name:?} is not the name of an instruction set; choose one of: {}", Isa::NAMES.join(", "))]
    Unknown {
        /// Value of the variable.
        name: String,
    },
    /// This machine lacks the instructions, its system does not allow them, or this build does not include them.
    #[error(
        "FERRULE_ISA={name:?} is not available: this machine lacks the instructions, its system does not allow them, or \
         this build leaves them out; choose one of: {available}"
    )]
    Missing {
        /// Value of the variable.
        name: String,
        /// Names that are available.
        available: String,
    },
}

impl Isa {
    /// Returns AVX-512 with VNNI and the same with the software model of a matrix unit, if this machine has VNNI.
    #[must_use]
    #[cfg(all(debug_assertions, target_arch = "x86_64", feature = "avx512vnni"))]
    pub fn vnni_and_model() -> Option<[Self; 2]> {
        let vnni = Avx512Vnni::detect()?;
        Some([Isa::Avx512Vnni(vnni), Isa::Model(WithUnit::new(vnni, Model))])
    }

    /// Runs `kernel` with the matrix unit of this instruction set. Returns `None` if it has none.
    #[inline]
    pub fn run_matrix<K: MatrixKernel>(self, kernel: K) -> Option<K::Output> {
        match self {
            #[cfg(all(target_arch = "x86_64", feature = "amx"))]
            Isa::Amx(token) => Some(token.run_matrix(kernel)),
            #[cfg(all(debug_assertions, target_arch = "x86_64", feature = "avx512vnni"))]
            Isa::Model(token) => Some(token.run_matrix(kernel)),
            _ => {
                let _ = kernel;
                None
            }
        }
    }

    /// Returns whether this instruction set has a matrix unit.
    #[must_use]
    pub fn has_matrix_unit(self) -> bool {
        struct Nothing;

        impl MatrixKernel for Nothing {
            type Output = ();

            fn run<S: Dot, M: MatrixUnit>(self, _: S, _: M) {}
        }

        self.run_matrix(Nothing).is_some()
    }

    /// Returns the name of the slowest instruction set that computes the same bits: a matrix unit changes none, since its
    /// sums are exact.
    #[must_use]
    pub fn arithmetic_name(self) -> &'static str {
        match self.name() {
            "amx" => "avx512vnni",
            name => name,
        }
    }

    /// Returns the fastest instruction set that this machine has and this build includes.
    #[must_use]
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Isa::Scalar(Scalar))
    }

    /// Returns the instruction set called `name`.
    ///
    /// # Errors
    /// [`IsaError`] if no instruction set has that name, this machine lacks it, or this build does not include it.
    pub fn named(name: &str) -> Result<Self, IsaError> {
        // The others are not detected: the use of AMX is requested only where it may be used.
        if let Some(isa) = Self::detect(name) {
            return Ok(isa);
        }
        if !Self::NAMES.contains(&name) {
            return Err(IsaError::Unknown { name: name.to_owned() });
        }
        let names: Vec<_> = Self::available().into_iter().map(Self::name).collect();
        Err(IsaError::Missing { name: name.to_owned(), available: names.join(", ") })
    }

    /// Returns the instruction set that `FERRULE_ISA` names, or the fastest if the variable is unset or empty.
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
