{{/* The RayService's name. KubeRay allows 47 characters, as it makes names of Services from it. */}}
{{- define "shoal.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{/* What all pods of the release have in common and no other pod of the namespace has.
app.kubernetes.io/name is KubeRay's: its Services select pods by it. The chart's version is not
among them, or every new one would mean new pods. */}}
{{- define "shoal.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: {{ include "shoal.fullname" . | quote }}
{{- end -}}

{{/* Labels of the chart's own objects. */}}
{{- define "shoal.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "shoal.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "shoal.httpPort" -}}
{{- (.Values.config.ingress | default dict).port | default 8000 | int64 -}}
{{- end -}}

{{- define "shoal.secretFile" -}}
/etc/shoal/secret
{{- end -}}

{{/* Takes root and the group's own image, which replaces what it names. */}}
{{- define "shoal.image" -}}
{{- $image := deepCopy .root.Values.image -}}
{{- if .image -}}
  {{- $image = mergeOverwrite (omit $image "digest") (deepCopy .image) -}}
{{- end -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- with $image.digest }}@{{ . }}{{ end }}
{{- end -}}
